import os

# Set before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
# A run starts some hundred processes: each module is compiled once, not in each of them.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# XLA optimises a program for two seconds and compiles it in one; tests run it a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:  # they take seconds, and the process that hands out the tests needs neither
    from transformers import PreTrainedModel

    from support.backends import SharedBackends

sys.dont_write_bytecode = False

for name in [name for name in os.environ if name.startswith("GPUSCORE_")]:
    del os.environ[name]  # what a developer has set must not change a test

ModelFactory: TypeAlias = "Callable[..., tuple[Path, PreTrainedModel]]"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models: a second thread only waits."""
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


# ---- how make test spreads the tests over its workers ----

# Servers that the tests of tests/server share. What uses one runs in one worker, which starts it;
# servers that do not answer yet leave time to others, so these tests begin first.
SERVERS = ("limited_server", "watched", "demo", "server")


def group_of(item: pytest.Item) -> str:
    """What runs in one worker: tests of one shared server, or else of one file."""
    used = getattr(item, "fixturenames", ())
    if item.nodeid.startswith("tests/server/"):
        for server in SERVERS:
            if server in used:
                return server
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`, in the workers."""
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
    """xdist puts "@group" behind a test's name; without it, the name can be given to pytest."""
    report = yield
    for mark in item.iter_markers("xdist_group"):
        report.nodeid = report.nodeid.removesuffix(f"@{mark.args[0]}")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """On Linux workers are forks of one process that has imported torch, transformers and JAX."""
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
    """One more than there are cores: while a deadline passes in one worker, the others compute."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return (len(affinity(0)) if affinity else os.cpu_count() or 1) + 1
