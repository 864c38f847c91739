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


def test_a_long_file_is_found(house):
    assert list(house.long_files({"gpuscore/x.py": 400, "tests/test_x.py": 400})) == []
    lines = house.long_files({"gpuscore/x.py": 401, "tests/test_x.py": 401})
    assert [line.split()[0] for line in lines] == ["gpuscore/x.py", "tests/test_x.py"]


def test_a_room_that_is_too_large_is_found(house):
    lengths = {"gpuscore/x.py": 45_000, "kernels/x.py": 1_000, "tests/test_x.py": 54_000}
    assert list(house.large_rooms(lengths)) == []
    lengths["kernels/x.py"] += 1
    said = list(house.large_rooms(lengths))
    assert said == [
        "gpuscore/ and kernels/ has 46001 lines, the limit is 46000",
        "all Python has 100001 lines, the limit is 100000",
    ]


def test_an_exception_has_a_limit_of_its_own(house):
    path, (most, _) = next(iter(house.LONGER.items()))
    assert list(house.long_files({path: most})) == []
    assert f"the limit is {most}" in next(house.long_files({path: most + 1}))


def test_a_repeated_class_is_found(house):
    other = trees(a="class Settings: ...", b="class _Settings: ...", c="x = 1")
    assert list(house.repeated_classes(other)) == []
    twice = trees(a="class Settings: ...", b="class Settings: ...")
    assert list(house.repeated_classes(twice)) == ["several classes are called Settings: in a, b"]


@pytest.mark.parametrize(
    "line", ["import a", "from a import x", "def f():\n    from a import x", "from a import c"]
)
def test_an_import_circle_is_found(house, line):
    assert list(house.import_circles(trees(a="import b", b="import json"))) == []
    circles = list(house.import_circles(trees(a="import b", b=line)))
    assert len(circles) == 1
    assert set(circles[0].split(": ")[1].split(" <- ")) == {"a", "b"}


@pytest.mark.parametrize("said", ["What of it is left.", "Of a plan, the keys.", "How many."])
def test_a_riddle_is_found(house, said):
    tree = ast.parse(f'def f():\n    """{said}"""')
    assert len(list(house.riddles("a.py", tree))) == 1
    assert not list(house.riddles("a.py", ast.parse('def f():\n    """Return the whole."""')))
