"""Promise: plain uvicorn's differences on the same requests are known; the files of requests say
why ours differ."""

import pytest

from support.hostile_requests import entries, names
from support.uvicorns import PARSERS, differences

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize("parser", PARSERS)
def test_differences_are_noted(parser: str) -> None:
    noted = {
        f"{name}: {entry.name}": entry.theirs[parser]
        for name in names()
        for entry in entries(name)
        if parser in entry.theirs
    }
    assert differences(parser) == noted
