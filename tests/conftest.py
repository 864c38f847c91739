import os

# These must be set before the libraries that read them are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
# A run starts some hundred processes: write .pyc files, so that each module is compiled only once.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# As the server sets it (gpuscore/backends/allocator.py), for the tests on a GPU.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# XLA takes two seconds to optimise a program and one to compile it; tests run it only a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:  # slow to import, and the process that hands out the tests needs neither
    from transformers import PreTrainedModel

    from support.backends import SharedBackends

sys.dont_write_bytecode = False

for name in [name for name in os.environ if name.startswith("GPUSCORE_")]:
    del os.environ[name]  # a developer's settings must not change a test

ModelFactory: TypeAlias = "Callable[..., tuple[Path, PreTrainedModel]]"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Limit torch to one thread: with tiny models a second one only waits."""
    import torch

    torch.set_num_threads(1)


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


# ---- distribution of the tests over the workers of make test ----

# Servers that the tests of tests/server share. All tests that use one run in the same worker, which
# starts it. They begin first, because starting servers leave the CPU to other workers.
SERVERS = ("limited_server", "watched", "demo", "server")


def group_of(item: pytest.Item) -> str:
    """Return the name of the group of tests that run in one worker: users of a shared server, or a
    file."""
    used = getattr(item, "fixturenames", ())
    if item.nodeid.startswith("tests/server/"):
        for server in SERVERS:
            if server in used:
                return server
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the groups for `--dist loadgroup`, in the workers."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    rank = {server: number for number, server in enumerate(reversed(SERVERS))}
    items.sort(key=lambda item: rank.get(group_of(item), len(SERVERS)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remove the "@group" that xdist appends, so that a test's name can be given to pytest."""
    report = yield
    for mark in item.iter_markers("xdist_group"):
        report.nodeid = report.nodeid.removesuffix(f"@{mark.args[0]}")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the workers, on Linux, from one process that has imported torch, transformers and
    JAX."""
    config = session.config
    workers = getattr(config.option, "tx", None)
    if not workers or hasattr(config, "workerinput") or sys.platform != "linux":
        return
    from support.fork_server import ForkServer

    server = ForkServer()
    config.add_cleanup(server.close)
    config.option.tx = [f"popen//python={server.command}" for _ in workers]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than there are cores: while one worker waits for a deadline, the others
    compute."""
    affinity = getattr(os, "sched_getaffinity", None)  # does not exist on every system
    return (len(affinity(0)) if affinity else os.cpu_count() or 1) + 1
