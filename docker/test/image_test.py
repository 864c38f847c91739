"""Builds the images and checks the containers against docker/README.md; needs no Docker daemon.

    make image-test                                   # the CPU image; contacts no registry
    make image-test ARGS='--images cpu cuda tpu'      # all three
    make image-test ARGS='--images cuda --own-lock'   # CUDA's libraries too: 2.7 GB of wheels
    make image-test BASE=python:3.12-slim             # that base, from a registry

The CPU and TPU images are built in full; the TPU image then computes on this machine's CPU. The
CUDA image is built with the CPU's lock file instead of its own, unless --own-lock is given. Every
step runs without a GPU.
"""

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from container import Container, size_of
from cuda_stack import check_compiler, check_device_is_needed, check_own_lock
from workshop import LOCKS, REFUSED, Problem, Workshop, expect, require_tools, step

from gpuscore import Scorer

KEY = "image-test-key-0123456789abcdef"
QUERY = "query: a blue wooden chair for the garden\nitem: "
ITEMS = ["A wooden garden chair in blue.", "A red steel lamp.", "A blue wool scarf."]
LABELS = ["yes", "no"]
TOLERANCE = 1e-4  # of a probability, in float32; the image may use JAX and this machine torch
LONG = 10_000  # items of the request that is in flight when the server gets SIGTERM

# Run by the container's own Python: sends one request, prints status and body as JSON.
CLIENT = """
import http.client, json, sys
key, method, path, body = sys.argv[1:5]
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
headers = {"Content-Type": "application/json"}
if key:
    headers["Authorization"] = "Bearer " + key
if body.startswith("LONG"):
    items = ["A blue lamp no. %d" % i for i in range(ITEMS)]
    body = json.dumps(json.loads(body[4:]) | {"items": items})
connection.request(method, path, body or None, headers)
answer = connection.getresponse()
print(json.dumps([answer.status, answer.read().decode()]))
""".replace("range(ITEMS)", f"range({LONG})")


@dataclass(frozen=True, slots=True)
class Image:
    """An image to build and how to run it."""

    dockerfile: str
    locks: Sequence[str]  # lock files to install
    substitute: bool = False  # use `locks` instead of the Dockerfile's own lock file
    environment: dict[str, str] = field(default_factory=dict)
    temporary: bool = True  # needs a /tmp


IMAGES = {
    "cpu": Image("Dockerfile.cpu", ("torch-cpu", "cpu"), temporary=False),
    "cuda": Image(
        "Dockerfile", ("torch-cpu", "cpu"), substitute=True, environment={"GPUSCORE_DEVICE": "cpu"}
    ),
    "tpu": Image("Dockerfile.tpu", ("torch-cpu", "tpu"), environment={"JAX_PLATFORMS": "cpu"}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", nargs="+", choices=tuple(IMAGES), default=["cpu"])
    parser.add_argument(
        "--own-lock",
        action="store_true",
        help="build the CUDA image with its own lock, 2.7 GB of wheels, and check CUDA's libraries",
    )
    parser.add_argument("--base", help="a base image instead of Debian's Python")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("/var/tmp/gpuscore-images"),
        help="where images are built; the base and the wheels stay there (default: %(default)s)",
    )
    values = parser.parse_args()
    images = dict(IMAGES)
    if values.own_lock:
        if "cuda" not in values.images:
            parser.error("--own-lock is for the CUDA image; add --images cuda")
        images["cuda"] = replace(IMAGES["cuda"], locks=("cuda",), substitute=False)
    start = time.monotonic()
    workshop = None
    try:
        require_tools(own_base=values.base is None)
        with step("base"):
            workshop = Workshop(values.directory, values.base)
        for name in values.images:
            check_image(workshop, name, images[name])
    except Problem as problem:
        print(f"image-test: {problem}", file=sys.stderr)
        return 1
    finally:
        if workshop is not None:
            workshop.close()
    print(f"all good after {time.monotonic() - start:.0f} s; Python {workshop.python}")
    return 0


def check_image(workshop: Workshop, name: str, image: Image) -> None:
    # Debian's python3 has its C headers in a package of their own.
    headers = name == "cuda" and not workshop.base_is_foreign
    arguments = {"PACKAGES": "python3-dev"} if headers else {}
    with step(f"{name}: build"):
        built = workshop.build(image.dockerfile, image.locks, image.substitute, arguments)
    container = Container(workshop, built, image.temporary)
    print(f"  {size_of(container.root) / 1e6:.0f} MB on disk")
    try:
        with step(f"{name}: contents and bill of materials"):
            check_contents(container)
            check_bill(container, image.locks)
        with step(f"{name}: commands"):
            container.run("--help")
            shown = container.run("info", "demo", **image.environment)
            expect("qwen3" in shown.lower(), "`info demo` names no model")
        if name == "cuda":
            with step("cuda: refuses to start without a device"):
                check_device_is_needed(container, image.substitute)
        with step(f"{name}: refuses to start without a key"):
            check_key_is_needed(container, image.environment)
        container.start(GPUSCORE_API_KEY=KEY, **image.environment)
        with step(f"{name}: health"):
            expect(not container.healthy(), "healthy before the server listens")
            print(f"  healthy after {container.until_healthy(120):.1f} s")
        with step(f"{name}: user, capabilities, read-only root, no network"):
            check_confinement(container)
        with step(f"{name}: scores"):
            check_scores(container)
        if name == "cuda":
            with step("cuda: the C compiler that Triton needs"):
                check_compiler(container)
        with step(f"{name}: SIGTERM with a request in flight"):
            check_drain(container)
        if name == "cuda" and not image.substitute:
            check_own_lock(container)
    finally:
        container.stop()


def check_contents(container: Container) -> None:
    """Check the image's settings, and that no files of the build are left."""
    config, root = container.config, container.root
    expect(config["User"] == "10001:10001", f"user {config['User']}")
    expect("PYTHONSAFEPATH=1" in config["Env"], "PYTHONSAFEPATH is not set")
    expect("/cache" in config["Volumes"], "/cache is no volume")
    installed = root / "opt" / "gpuscore"
    expect(not list(installed.glob("lib/python*/site-packages/pip")), "pip is in the image")
    for left in ("src", "wheels", "locks", "build", "etc/pip.conf"):
        expect(not (root / left).exists(), f"/{left} was left in the image")


def check_bill(container: Container, locks: Sequence[str]) -> None:
    """Check that the bill of materials lists the locked packages at their locked versions."""
    bill = json.loads((container.root / "opt" / "gpuscore" / "sbom.cdx.json").read_text())
    expect(bill["bomFormat"] == "CycloneDX", "the bill of materials is not CycloneDX")
    listed = {normal(part["name"]): part["version"] for part in bill["components"]}
    ours = listed.pop("gpuscore", None)
    expect(ours is not None, "gpuscore is not in the bill of materials")
    locked = dict(pair for lock in locks for pair in locked_versions(LOCKS / f"{lock}.txt"))
    expect(listed == locked, f"differs from the lock: {set(listed.items()) ^ set(locked.items())}")
    print(f"  CycloneDX {bill['specVersion']}, {len(bill['components'])} packages")


def locked_versions(lock: Path) -> list[tuple[str, str]]:
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock.read_text(), re.MULTILINE)
    return [(normal(name), version) for name, version in pins]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check_key_is_needed(container: Container, environment: dict[str, str]) -> None:
    """Check it in every form that starts a server; each has to bind more than loopback."""
    for arguments in ((), ("serve", "demo"), ("--model", "demo")):
        container.start(*arguments, **environment)
        code = container.wait(60)
        expect(code == REFUSED, f"{arguments}: exit code {code}:\n{container.output()}")
        said = "--host 0.0.0.0" in container.output() and "GPUSCORE_API_KEY" in container.output()
        expect(said, f"{arguments}: the message does not say what is missing")


def check_confinement(container: Container) -> None:
    status = container.execute("python", "-c", "print(open('/proc/1/status').read())").stdout
    expect("Uid:\t10001\t10001" in status, "process 1 is not user 10001")
    expect("CapEff:\t0000000000000000" in status, "process 1 has capabilities")
    written = container.execute("python", "-c", "open('/opt/gpuscore/x', 'w')")
    expect("Read-only file system" in written.stderr, "the root can be written to")
    devices = container.execute("python", "-c", "print(open('/proc/net/dev').read())").stdout
    interfaces = re.findall(r"^\s*(\w+):", devices, re.MULTILINE)
    expect(interfaces == ["lo"], f"network interfaces: {interfaces}")


def check_scores(container: Container) -> None:
    """Check that scores equal `Scorer`'s on this machine, and need the key."""
    wait_for(lambda: request(container, "GET", "/ready")[0] == 200, 120, "ready")
    body = {"query": QUERY, "items": ITEMS, "labels": LABELS, "apply_softmax": True}
    status, _ = request(container, "POST", "/v1/score", body, key="")
    expect(status == 401, f"without a key: {status}")
    status, text = request(container, "POST", "/v1/score", body)
    expect(status == 200, f"with the key: {status} {text}")
    with Scorer("demo") as scorer:
        known = scorer.score(QUERY, ITEMS, labels=LABELS, apply_softmax=True).scores.tolist()
    pairs = zip(sum(json.loads(text)["scores"], []), sum(known, []), strict=True)
    apart = max(abs(ours - theirs) for ours, theirs in pairs)
    expect(apart < TOLERANCE, f"scores are {apart} apart")
    print(f"  scores {apart:.1e} apart from Scorer's")


def check_drain(container: Container) -> None:
    """Check that after SIGTERM the server answers the request in flight and exits with 0."""
    wanted = "LONG" + json.dumps({"query": QUERY, "labels": LABELS})
    flying = container.background("python", "-c", CLIENT, KEY, "POST", "/v1/score", wanted)
    wait_for(lambda: waiting_tokens(container) > 0, 30, "the request in flight")
    container.signal(signal.SIGTERM)
    signalled = time.monotonic()
    output, _ = flying.communicate(timeout=90)
    status, text = json.loads(output)
    expect(status == 200, f"the request in flight got {status}: {text[:300]}")
    expect(len(json.loads(text)["scores"]) == LONG, "scores are missing")
    code = container.wait(30)
    expect(code == 0, f"exit code {code}:\n{container.output()}")
    print(f"  ended with 0, {time.monotonic() - signalled:.1f} s after the signal")


def waiting_tokens(container: Container) -> float:
    _, text = request(container, "GET", "/metrics")
    match = re.search(r"^gpuscore_tokens_waiting\{.*\} (\S+)", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def request(
    container: Container, method: str, path: str, body: Any = None, key: str = KEY
) -> tuple[int, str]:
    text = json.dumps(body) if body else ""
    done = container.execute("python", "-c", CLIENT, key, method, path, text)
    expect(done.returncode == 0, f"{method} {path} failed:\n{done.stderr}")
    status, answer = json.loads(done.stdout)
    return status, answer


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Problem(f"{what}: not within {seconds} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
