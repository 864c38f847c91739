import os

# These must be set before the libraries that read them are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
# A run starts some hundred processes: write .pyc files, so that each module is compiled only once.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# As the server sets it (`set_allocator` of gpuscore/backends), for the tests on a GPU.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# A client of httpx reads all certificates, which takes 30 ms; no test speaks TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)  # holds none
# A C compiler that keeps what it compiled: tests start some fifty backends with functions in C.
os.environ["PATH"] = os.pathsep.join(
    (os.path.join(os.path.dirname(__file__), "support", "kept_compiler"), os.environ["PATH"])
)
# XLA takes two seconds to optimise a program and one to compile it; tests run it only a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if "RECOMPUTE_REFERENCES" not in os.environ:  # make test-all compiles everything
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR",
        os.path.join(os.path.dirname(os.path.dirname(__file__)), ".cache", "tests", "programs"),
    )
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import gc
import importlib.metadata
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:  # slow to import, and the process that hands out the tests needs neither
    from transformers import PreTrainedModel

    from support.backends import SharedBackends

sys.dont_write_bytecode = False

# With torch's CPU build, tests run on the CPU of a machine with a GPU too: `--device auto` would
# refuse to leave the GPU unused.
CPU_BUILD = importlib.metadata.version("torch").endswith("+cpu")
if CPU_BUILD:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

for name in [name for name in os.environ if name.startswith("GPUSCORE_")]:
    del os.environ[name]  # a developer's settings must not change a test

# nohup, or a shell for a program in the background, has these ignored. Servers of the tests would
# inherit that, and tests send such signals.
for number, usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

ModelFactory: TypeAlias = "Callable[..., tuple[Path, PreTrainedModel]]"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Limit torch to one thread: with tiny models a second one only waits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_of_other_files() -> None:
    """Let garbage collection, which Scorer and the load generator call, visit a file's objects
    only."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """A factory: tiny_model("llama", **config) -> (directory, transformers model), cached."""
    from support.models import make_model

    made: dict[Any, tuple[Path, PreTrainedModel]] = {}

    def make(family: str = "qwen3", **overrides: Any) -> "tuple[Path, PreTrainedModel]":
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = directory, make_model(directory, family, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def shared_backends(tiny_model: ModelFactory) -> "Iterator[SharedBackends]":
    """Backends over tiny models that are loaded once: get("jax", "qwen3", dtype="float32")."""
    from support.backends import SharedBackends

    backends = SharedBackends(tiny_model)
    yield backends
    backends.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep Python's garbage collection from visiting what stays for the whole run: thousands of
    tests, and the modules that were imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# ---- distribution of the tests over the workers of make test ----

GROUPS = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := getattr(config, "workerinput", {}).get("groups"):
        from support.groups import sort_and_write

        sort_and_write(items, Path(path))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if path := node.config.stash.get(GROUPS, None):
        node.workerinput["groups"] = str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if path := config.stash.get(GROUPS, None):
        from support.groups import GroupScheduling

        return GroupScheduling(config, log, path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Prepare the workers: the groups of tests of `--dist loadgroup`, and, on Linux, forks of one
    process that has imported torch, transformers and JAX.

    With another build of torch the workers import by themselves: on a machine with a GPU these
    imports start a thread, and a fork cannot use a GPU that its parent has used.
    """
    config = session.config
    workers = getattr(config.option, "tx", None)
    if not workers or hasattr(config, "workerinput"):
        return
    if config.getvalue("dist") == "loadgroup":
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.stash[GROUPS] = Path(folder.name, "groups.json")
    if sys.platform != "linux" or not CPU_BUILD:
        return
    from support.fork_server import WORKERS, ForkServer

    server = ForkServer(WORKERS)
    config.add_cleanup(server.close)
    config.option.tx = [f"popen//python={server.command}" for _ in workers]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return two more than there are cores: while some workers wait for a deadline, the others
    compute."""
    affinity = getattr(os, "sched_getaffinity", None)  # does not exist on every system
    return (len(affinity(0)) if affinity else os.cpu_count() or 1) + 2
