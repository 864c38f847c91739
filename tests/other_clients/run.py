"""Other people's clients against this server: `make test-clients`, or for some environments only
`make test-clients ARGS='cohere litellm'`.

Every client has a virtual environment of its own, because the clients exclude each other's
versions. It is made once from a file of exact versions and reused as long as that file is
unchanged. None contains any part of gpuscore: the tests know only the server's address. This script
uses only the standard library.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
MODEL = str(ROOT / "gpuscore" / "demo")
KEY = "the-key-of-the-clients"
# conftest.py sends as many requests as one key may have in flight; the expected wait for that work
# must not lead to a refusal.
LIMITS = ["--threads=1", "--max-inflight-per-key=2", "--max-queue-seconds=3600"]
LIMITS += ["--request-timeout=3600"]
TESTS = {
    "cohere": ("test_cohere.py", "test_haystack.py", "test_infinity.py"),
    "openai": ("test_openai.py",),
    "litellm": ("test_litellm.py", "test_rerankers.py"),
    "langchain": ("test_langchain.py",),
    "llama_index": ("test_llama_index.py",),
    "lm_eval": ("test_lm_eval.py",),
    "vllm_router": ("test_vllm_router.py",),
}
TWO_SERVERS = "vllm_router"  # a router needs another server beside the first
# Settings for clients that otherwise download something at import or start, or report home.
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "TIKTOKEN_CACHE_DIR": str(ENVIRONMENTS / "tiktoken"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=", ".join(TESTS))
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement of the CPU build")
    parser.add_argument("--torch-index", default="", metavar="URL", help="where else it may be")
    arguments = parser.parse_args()
    names = arguments.names or list(TESTS)
    if unknown := set(names) - set(TESTS):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    torch = Torch(arguments.torch, arguments.torch_index)
    pythons = {name: environment(name, torch) for name in names}
    failed = []
    with ExitStack() as stack:
        url = stack.enter_context(serving("server"))
        for name, python in pythons.items():
            print(f"\n==== {name}", flush=True)
            other = stack.enter_context(serving("other")) if name == TWO_SERVERS else ""
            if run_tests(python, TESTS[name], url, other) != 0:
                failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall clients passed")
    return bool(failed)


@dataclass(frozen=True)
class Torch:
    """The CPU build for environments whose requirements say `# torch`: a file of versions cannot
    name it, because its name depends on the platform and its index."""

    requirement: str
    index: str

    def install(self, python: Path) -> None:
        what = f"installing {self.requirement}, some 200 MB: one or two minutes"
        index = ("--or-extra-index-url", self.index)
        install(python, what, *index, "install", "--no-deps", self.requirement)


def install(python: Path, *arguments: str | Path) -> None:
    """Run tools/install.py, which says what is wrong before this ends."""
    if subprocess.run([python, ROOT / "tools" / "install.py", *arguments]).returncode:
        sys.exit(1)


def environment(name: str, torch: Torch) -> Path:
    """Return the Python of an environment, which is made if none has these requirements yet."""
    requirements = HERE / "requirements" / f"{name}.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    content = requirements.read_bytes() + version.encode() + torch.requirement.encode()
    path = ENVIRONMENTS / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    python, done = path / "bin" / "python", path / ".installed"
    if not done.exists():
        print(f"making {path}: up to half a minute", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", path], check=True)
        if b"# torch" in content:
            torch.install(python)
        # The files name every package, so there is nothing to resolve.
        what = f"installing {name}: up to two minutes"
        install(python, what, "install", "--no-deps", "-r", requirements)
        done.touch()
    return python


def run_tests(python: Path, files: tuple[str, ...], url: str, other: str) -> int:
    unset = ("PYTHONPATH", "PYTHONHOME", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    ours = {"SERVER_URL": url, "OTHER_URL": other, "SERVER_KEY": KEY, "MODEL_DIRECTORY": MODEL}
    variables = inherited | OFFLINE | ours
    command = [python, "-m", "pytest", "-q", "-c", HERE / "pytest.ini", *(HERE / f for f in files)]
    return subprocess.run(command, cwd=HERE, env=variables).returncode


@contextmanager
def serving(name: str) -> Iterator[str]:
    """Serve the demo model with this Python's own installation and yield the address; the log is
    named so."""
    command = [Path(sys.executable).with_name("gpuscore"), "serve", "demo", "--port", "0"]
    ENVIRONMENTS.mkdir(exist_ok=True)
    log = ENVIRONMENTS / f"{name}.log"
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [*command, *LIMITS],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"GPUSCORE_API_KEY": KEY},
        )
    try:
        start = time.monotonic()
        for line in server.stdout or ():
            if "ready on" in line:
                print(f"the server was ready after {time.monotonic() - start:.1f} s")
                yield line.split("ready on ")[1].split(" ")[0]
                break
        else:
            sys.exit(f"the server stopped with {server.wait()}, see {log}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
