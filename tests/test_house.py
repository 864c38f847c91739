"""Promise: tools/check_house.py finds every kind of breach that it looks for, and none in this
tree."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "check_house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trees(**sources):
    return {name: ast.parse(source) for name, source in sources.items()}


@pytest.mark.slow  # `make check` runs the tool itself
def test_the_repository_follows_the_rules(house, capsys):
    assert house.main() == 0, capsys.readouterr().err


def test_a_room_that_is_too_large_is_found(house, monkeypatch):
    monkeypatch.setattr(house, "SIZES", {"": 100, "gpuscore/ kernels/": 60, "bench/": 10})
    lengths = {"gpuscore/x.py": 50, "kernels/x.py": 10, "bench/x.py": 10, "tests/test_x.py": 30}
    assert list(house.large_rooms(lengths)) == []
    lengths["kernels/x.py"] += 1
    lengths["bench/x.py"] += 2
    assert list(house.large_rooms(lengths)) == [
        "all Python has 103 lines, the limit is 100",
        "gpuscore/ and kernels/ has 61 lines, the limit is 60",
        "bench/ has 12 lines, the limit is 10",
    ]


@pytest.mark.parametrize(
    "line", ["import a", "from a import x", "def f():\n    from a import x", "from a import c"]
)
def test_an_import_circle_is_found(house, line):
    assert list(house.import_circles(trees(a="import b", b="import json"))) == []
    circles = list(house.import_circles(trees(a="import b", b=line)))
    assert len(circles) == 1
    assert set(circles[0].split(": ")[1].split(" <- ")) == {"a", "b"}
