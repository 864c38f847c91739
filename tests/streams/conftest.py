"""A model directory for the worlds, and silence about their simulated failures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.streams.model import write_model
from support.streams.worlds import silent


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("streams"))


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    with silent():
        yield
