"""Keeps what templates render to: a process for each takes a tenth of a second."""

import json
from functools import cache

import pytest

from gpuscore.prompts import chat, rendering

once = cache(lambda job: rendering.render(*json.loads(job)))


@pytest.fixture(scope="module", autouse=True)
def _rendered_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "render", lambda *job: once(json.dumps(job)))
        yield
