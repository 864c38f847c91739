"""Checks an image and its container against docker/README.md, by docker or podman.

    make image-test                       # builds the CPU image first
    make image-test FLAVOUR=tpu           # JAX computes on this machine's CPU
    make image-test FLAVOUR=cuda          # needs no GPU
    make image-test ENGINE=podman

The container has a read-only root, no capabilities, no new privileges and no network but loopback,
so requests are sent from inside, with the image's own Python.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuscore import Scorer

ROOT = Path(__file__).parents[2]
LOCKS = {"cpu": ("torch-cpu", "cpu"), "cuda": ("cuda",), "tpu": ("torch-cpu", "tpu")}
ENVIRONMENT = {"cpu": [], "cuda": ["GPUSCORE_DEVICE=cpu"], "tpu": ["JAX_PLATFORMS=cpu"]}
CONFINED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
KEY = "image-test-key-0123456789abcdef"
REFUSED = 78  # exit code of gpuscore when a setting is wrong
SCORED = {
    "query": "query: a blue wooden chair for the garden\nitem: ",
    "items": ["A wooden garden chair in blue.", "A red steel lamp.", "A blue wool scarf."],
    "labels": ["yes", "no"],
    "apply_softmax": True,
}
TOLERANCE = 1e-4  # of a probability, in float32; the image may use JAX and this machine torch
LONG = 10_000  # items of the request that is in flight when the server gets SIGTERM

# Run by the container's own Python: sends a request, prints its status and body as JSON.
CLIENT = """
import http.client, json, sys
key, method, path, body, items = sys.argv[1:6]
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
if int(items):
    many = ["A lamp no. %d" % number for number in range(int(items))]
    body = json.dumps(json.loads(body) | {"items": many})
connection.request(method, path, body or None, headers)
answer = connection.getresponse()
print(json.dumps([answer.status, answer.read().decode()]))
"""
# What process 1 may do, and what is in the image.
FACTS = """
import glob, json, os
site, = glob.glob("/opt/gpuscore/lib/python*/site-packages")
left = [path for path in ("/src", "/wheels", "/locks", "/build", "/etc/pip.conf", site + "/pip")
        if os.path.exists(path)]
try:
    open("/opt/gpuscore/x", "w")
except OSError as error:
    written = error.strerror
bill = json.load(open("/opt/gpuscore/sbom.cdx.json"))
print(json.dumps({"left": left, "written": written, "bill": bill,
                  "status": open("/proc/1/status").read(), "net": open("/proc/net/dev").read()}))
"""


def expect(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(f"image-test: {message}")


class Container:
    """Runs of an image with few rights; one at a time."""

    def __init__(self, engine: str, image: str, environment: list[str]) -> None:
        self._engine, self._image = engine, image
        described = json.loads(self.do("image", "inspect", image))[0]
        self.config: dict[str, Any] = described["Config"]
        self.health = (self.config.get("Healthcheck") or described["Healthcheck"])["Test"]
        self._variables = [f"--env={variable}" for variable in environment]
        self._name = ""

    def do(self, *words: str) -> str:
        done = subprocess.run([self._engine, *words], capture_output=True, text=True, check=False)
        expect(done.returncode == 0, f"{' '.join(words[:3])} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, *words: str, key: bool = True) -> None:
        self.remove()
        keys = [f"--env=GPUSCORE_API_KEY={KEY}"] if key else []
        flags = (*CONFINED, "--tmpfs=/tmp", *self._variables, *keys)
        self._name = self.do("run", "--detach", *flags, self._image, *words).strip()

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all output."""
        code = int(self.do("wait", self._name))
        command = [self._engine, "logs", self._name]
        logs = subprocess.run(command, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True)
        return code, logs.stdout

    def command(self, *words: str) -> list[str]:
        return [self._engine, "exec", self._name, *words]

    def healthy(self) -> bool:
        """Run the image's own health check once."""
        done = subprocess.run(self.command(*self.health[1:]), capture_output=True, check=False)
        return done.returncode == 0

    def ask(self, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, str]:
        text = json.dumps(body) if body else ""
        client = ("python", "-c", CLIENT, key, method, path, text, "0")
        status, answer = json.loads(self.do("exec", self._name, *client))
        return status, answer

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.do("exec", self._name, "python", "-c", FACTS))
        return found

    def stop(self) -> None:
        self.do("kill", "--signal=SIGTERM", self._name)

    def remove(self) -> None:
        if self._name:
            self.do("rm", "--force", "--volumes", self._name)
        self._name = ""


def check_refusals(container: Container, flavour: str) -> None:
    """Check that no form of a start goes without a key, nor the CUDA image without a GPU."""
    for words in ((), ("serve", "demo"), ("--model", "demo")):
        container.start(*words, key=False)
        code, said = container.wait()
        expect(code == REFUSED and "GPUSCORE_API_KEY" in said, f"{words}: {code}\n{said}")
    if flavour == "cuda":
        container.start("info", "demo", "--device", "cuda")
        code, said = container.wait()
        expect(code == REFUSED and "this torch sees no CUDA device" in said, f"{code}\n{said}")


def check_contents(container: Container, flavour: str) -> None:
    config, facts = container.config, container.facts()
    expect(config["User"] == "10001:10001", f"user {config['User']}")
    expect("/cache" in config["Volumes"], "/cache is no volume")
    expect(not facts["left"], f"files of the build were left: {facts['left']}")
    expect(facts["written"] == "Read-only file system", "the root can be written to")
    expect("Uid:\t10001\t10001" in facts["status"], "process 1 is not user 10001")
    expect("CapEff:\t0000000000000000" in facts["status"], "process 1 has capabilities")
    expect(re.findall(r"^\s*(\w+):", facts["net"], re.M) == ["lo"], facts["net"])
    listed = {normal(part["name"]): part["version"] for part in facts["bill"]["components"]}
    expect(listed.pop("gpuscore", None) is not None, "gpuscore is not in the bill of materials")
    text = "\n".join((ROOT / f"docker/locks/{lock}.txt").read_text() for lock in LOCKS[flavour])
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.M)
    locked = {normal(name): version for name, version in pins}
    expect(listed == locked, f"differs from the lock: {set(listed.items()) ^ set(locked.items())}")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_scores(container: Container) -> None:
    """Check that scores equal `Scorer`'s on this machine, and need the key."""
    status, _ = container.ask("POST", "/v1/score", SCORED, key="wrong")
    expect(status == 401, f"with a wrong key: {status}")
    status, text = container.ask("POST", "/v1/score", SCORED)
    expect(status == 200, f"with the key: {status} {text}")
    with Scorer("demo") as scorer:
        known = scorer.score(**SCORED).scores.ravel().tolist()
    pairs = zip(sum(json.loads(text)["scores"], []), known, strict=True)
    apart = max(abs(ours - theirs) for ours, theirs in pairs)
    expect(apart < TOLERANCE, f"scores are {apart} apart")
    print(f"  scores {apart:.1e} apart from Scorer's")


def check_drain(container: Container) -> None:
    """Check that after SIGTERM the server answers the request in flight and exits with 0."""
    client = ("python", "-c", CLIENT, KEY, "POST", "/v1/score", json.dumps(SCORED), str(LONG))
    command = container.command(*client)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flying:
        waiting = re.compile(r"^gpuscore_tokens_waiting\{.*\} [1-9]", re.M)
        until(lambda: waiting.search(container.ask("GET", "/metrics")[1]) is not None)
        container.stop()
        status, text = json.loads(flying.communicate(timeout=90)[0])
    expect(status == 200, f"the request in flight got {status}: {text[:300]}")
    expect(len(json.loads(text)["scores"]) == LONG, "scores are missing")
    code, said = container.wait()
    expect(code == 0 and "or stop the container;" in said, f"exit code {code}:\n{said}")


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < end, f"not within {seconds} s")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavour", choices=tuple(LOCKS), default="cpu")
    parser.add_argument("--engine", default="docker", help="docker, or podman")
    parser.add_argument("--image", required=True, help="that was built")
    values = parser.parse_args()
    container = Container(values.engine, values.image, ENVIRONMENT[values.flavour])
    try:
        check_refusals(container, values.flavour)
        container.start()
        until(container.healthy)
        until(lambda: container.ask("GET", "/ready")[0] == 200)
        check_contents(container, values.flavour)
        check_scores(container)
        check_drain(container)
    finally:
        container.remove()
    print("all good")


if __name__ == "__main__":
    main()
