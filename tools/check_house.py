"""Checks of CONTRIBUTING.md's promises that no linter checks: length of files, size, first words of
docstrings, names of classes, import cycles. `make check` runs it.

    python -P tools/check_house.py
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "docker", "docs", "examples", "gpuscore", "kernels", "tests", "tools")

MAX_LINES = 400
# Files that may be longer, with their limit and the reason.
LONGER = {
    "gpuscore/server/http/protocol.py": (405, "one connection, and every state of it"),
    "tests/engine/test_scheduler.py": (405, "one scheduler, and every promise of it"),
    "tests/support/broken_models.py": (520, "one function for each way to break a model's files"),
}

# Lines of all files whose paths begin so, at most: nobody holds more in one head.
SIZES = {("gpuscore/", "kernels/"): 46_000, ("",): 100_000}

RIDDLE = re.compile(
    r"(What|Of|Where|Whether|How|As|Whose|Which|When|That|Those|For|In|By|To|Up|Nobody|Nothing)\b"
)

# Modules by full name, with their syntax trees.
Modules: TypeAlias = Mapping[str, ast.Module]


def long_files(lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield a complaint about each file that is too long."""
    for path, length in lengths.items():
        most, _ = LONGER.get(path, (MAX_LINES, ""))
        if length > most:
            yield f"{path} has {length} lines, the limit is {most}"


def large_rooms(lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield a complaint about each room of `SIZES` that has too many lines."""
    for beginnings, most in SIZES.items():
        total = sum(length for path, length in lengths.items() if path.startswith(beginnings))
        if total > most:
            room = " and ".join(filter(None, beginnings)) or "all Python"
            yield f"{room} has {total} lines, the limit is {most}"


def repeated_classes(modules: Modules) -> Iterator[str]:
    """Yield a complaint about each name that several public classes have."""
    places = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    for name, files in places.items():
        if len(files) > 1:
            yield f"several classes are called {name}: in {', '.join(files)}"


def riddles(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield complaints about docstrings that open with neither a verb nor a noun."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if RIDDLE.match(said := ast.get_docstring(node) or ""):
            yield f"{path}: a docstring opens with {said.split()[0]!r}, not with a verb or a noun"


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
        *long_files(lengths),
        *large_rooms(lengths),
        *(bad for path, tree in trees.items() for bad in riddles(path, tree)),
        *repeated_classes(modules),
        *import_circles(modules),
    ]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
