"""The real model: in transformers, served over HTTP, and in its golden bundle."""

import os

# These must be set before the libraries that read them are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from collections.abc import Iterator

import httpx
import pytest
import torch

from gpuscore.measure.results import Measured
from reference import MODEL, Reference
from support.golden import golden
from support.serving import serving

for name in [name for name in os.environ if name.startswith("GPUSCORE_")]:
    del os.environ[name]  # a developer's settings must not change a test


def pytest_sessionstart() -> None:
    if not (MODEL / "config.json").is_file():
        raise pytest.UsageError(f"{MODEL} is not there: make test-real")


@pytest.fixture(scope="session")
def reference() -> Reference:
    torch.set_num_threads(1)  # a worker of pytest-xdist has a core
    return Reference()


@pytest.fixture(scope="session")
def bundle() -> Measured:
    """Scores of transformers for the workload of real sentences, as checked in."""
    return golden("smollm2-float32", model=MODEL)


@pytest.fixture(scope="session")
def real() -> Iterator[httpx.Client]:
    """A client of a server as `make serve MODEL=smollm2` starts it, in float32."""
    flags = ("--family", "instruct", "--device", "cpu", "--dtype", "float32", "--threads", "1")
    with (
        serving(MODEL, *flags, fork=False) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield client
