"""Checks of CONTRIBUTING.md's promises that no linter checks: size of rooms, import cycles. `make
check` runs it.

    python -P tools/check_house.py
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "docker", "docs", "examples", "gpuscore", "kernels", "tests", "tools")

# Lines of all files whose paths begin with one of these words, at most: nobody holds more in one
# head. "" is all Python.
SIZES = {
    "": 95_000,
    "gpuscore/ kernels/": 42_000,
    "gpuscore/measure/": 3_200,
    "bench/": 1_800,
    "docker/": 450,
    "tests/": 45_000,
}

# Modules by full name, with their syntax trees.
Modules: TypeAlias = Mapping[str, ast.Module]


def large_rooms(lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield a complaint about each room of `SIZES` that has too many lines."""
    for room, most in SIZES.items():
        beginnings = tuple(room.split()) or ("",)
        total = sum(length for path, length in lengths.items() if path.startswith(beginnings))
        if total > most:
            name = " and ".join(room.split()) or "all Python"
            yield f"{name} has {total} lines, the limit is {most}"


def import_circles(modules: Modules) -> Iterator[str]:
    """Yield a complaint about each package whose modules or packages import each other in a circle,
    anywhere in their code."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, tree in modules.items():
        for target in _imported(tree, modules):
            package, part, other = _parted(name, target)
            if part and other and part != other:
                graphs[package][part].add(other)
    for package, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            yield f"imports in {package} go in a circle: {' <- '.join(error.args[1])}"


def _parted(name: str, target: str) -> tuple[str, str, str]:
    """Return the package that two modules share, and the part of it that each is in.

    A part is empty if a module is that package's own `__init__`.
    """
    ours, theirs = name.split("."), target.split(".")
    shared = next(
        (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) > 1),
        min(len(ours), len(theirs)),
    )
    return ".".join(ours[:shared]), *(
        "".join(parts[shared : shared + 1]) for parts in (ours, theirs)
    )


def _imported(tree: ast.Module, modules: Modules) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imported = full if full in modules else node.module
                if imported in modules:
                    yield imported


def shipped(trees: Mapping[str, ast.Module]) -> Modules:
    """Return the modules that are shipped, of syntax trees by path."""
    modules = {}
    for path, tree in trees.items():
        name = path.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
        if name.startswith("gpuscore"):
            modules[name.removesuffix(".__init__")] = tree
    return modules


def read_sources() -> dict[str, str]:
    """Read every Python file, by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def main() -> int:
    sources = read_sources()
    trees = {path: ast.parse(source) for path, source in sources.items()}
    modules = shipped(trees)
    lengths = {path: len(source.splitlines()) for path, source in sources.items()}
    complaints = [
        *large_rooms(lengths),
        *import_circles(modules),
    ]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
