import os

# Set before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# XLA optimises a program for two seconds and compiles it in one; tests run it a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:  # they take seconds, and the process that hands out the tests needs neither
    from transformers import PreTrainedModel

    from support.backends import SharedBackends

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


# ---- how make test distributes the files over its workers ----

# What takes longest begins first, so that no core is left waiting for the last file.
LONGEST = (
    "tests/server",
    "tests/kernels/test_interpreted.py",
    "tests/engine/test_client.py",
    "tests/test_parity.py",
    "tests/server/test_supervision.py",
    "tests/engine/test_simulation.py",
    "tests/backends/test_deterministic.py",
    "tests/backends/test_jax.py",
    "tests/parity/test_run.py",
    "tests/backends/test_contract.py",
    "tests/server of demo",
    "tests/client/test_client.py",
    "tests/server/test_classes.py",
    "tests/server/test_overload.py",
    "tests/test_classifiers.py",
    "tests/backends/test_every_position.py",
    "tests/test_demo.py",
    "tests/backends/test_jax_attention.py",
    "tests/kernels/test_compile_check.py",
    "tests/backends/test_compiler.py",
    "tests/test_config_commands.py",
)
# Files of tests/server that do not share its servers, or a server of the demo model only.
APART = (
    "test_classes.py",
    "test_overload.py",
    "test_parser.py",
    "test_rounds.py",
    "test_supervision.py",
)
OF_DEMO = (
    "test_dialects.py",
    "test_docs.py",
    "test_examples.py",
    "test_fields.py",
    "test_rerank.py",
)


def unit_of(nodeid: str) -> str:
    """What runs in one worker: a file, or all files that share servers."""
    folder, _, file = nodeid.partition("::")[0].rpartition("/")
    if folder == "tests/server" and file in OF_DEMO:
        return "tests/server of demo"
    return folder if folder == "tests/server" and file not in APART else f"{folder}/{file}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        rank = {unit: number for number, unit in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(unit_of(item.nodeid), len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are cores: processes that start and deadlines that pass need none."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return (len(affinity(0)) if affinity else os.cpu_count() or 1) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Scheduling(config, log)
