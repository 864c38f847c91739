"""Keeps what templates render to: tests of one template start one process for it."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from gpuscore.prompts import rendering


@cache
def _rendered(job: str) -> Any:
    return rendering.render(*json.loads(job))


@pytest.fixture(scope="module", autouse=True)
def _rendered_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpuscore.prompts.chat.render", lambda *job: _rendered(json.dumps(job)))
        yield
