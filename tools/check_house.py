"""Checks of CONTRIBUTING.md's promises that no linter checks: length of files, first words of
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
FOLDERS = (
    *("bench", "docker", "docs", "examples", "gpuscore", "kernels"),
    *("tests", "tests_clients", "tests_ray", "tests_web", "tools", "training"),
)

MAX_LINES, MAX_TEST_LINES = 400, 400
# Files that may be longer, with their limit and the reason.
LONGER = {
    "gpuscore/backends/common/hf_config.py": (365, "every field of config.json that is read"),
    "gpuscore/config/fields.py": (450, "every setting of every command"),
    "gpuscore/engine/scheduler.py": (350, "one state machine, whose invariants span its methods"),
    "gpuscore/prompts/documents.py": (350, "one family's prompts, from labels to cut documents"),
    "gpuscore/server/http/protocol.py": (410, "one connection's states, which share a deadline"),
    "gpuscore/text/joining.py": (330, "every check of a request, in the order of the checks"),
    "gpuscore/text/tokenizer.py": (345, "every way to encode or decode a text"),
    "kernels/gpuscore_kernels/extend_attention/triton.py": (390, "one kernel and its launches"),
    "tests/test_imports.py": (580, "one table of what each part may import"),
    "tests/engine/test_scheduler.py": (405, "one scheduler, and every promise of it"),
    "tests/support/broken_models.py": (520, "one function for each way to break a model's files"),
    "training/demo/synthetic.py": (560, "every wording of queries and items"),
    "training/demo/train.py": (490, "a script that is read from top to bottom"),
}

RIDDLE = re.compile(
    r"(What|Of|Where|Whether|How|As|Whose|Which|When|That|Those|For|In|By|To|Up|Nobody|Nothing)\b"
)

# Modules by full name, with their syntax trees.
Modules: TypeAlias = Mapping[str, ast.Module]


def long_files(lengths: Mapping[str, int]) -> Iterator[str]:
    """Yield a complaint about each file that is too long."""
    for path, length in lengths.items():
        tests = path.startswith(("tests/", "tests_ray/", "tests_web/"))
        usual = MAX_TEST_LINES if tests else MAX_LINES
        most, _ = LONGER.get(path, (usual, ""))
        if length > most:
            yield f"{path} has {length} lines, the limit is {most}"


def repeated_classes(modules: Modules) -> Iterator[str]:
    """Yield a complaint about each name that several public classes have."""
    places = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    for name, found in places.items():
        if len(found) > 1:
            yield f"several classes are called {name}: in {', '.join(found)}"


def riddles(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield complaints about docstrings that open with neither a verb nor a noun."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if RIDDLE.match(said := ast.get_docstring(node) or ""):
            yield f"{path}: a docstring opens with {said.split()[0]!r}, not with a verb or a noun"


def import_circles(modules: Modules) -> Iterator[str]:
    """Yield a complaint about modules that import each other, anywhere in their code."""
    graph = {name: set(_imported(tree, modules)) - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"imports go in a circle: {' <- '.join(error.args[1])}"


def _imported(tree: ast.Module, modules: Modules) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found = full if full in modules else node.module
                if found in modules:
                    yield found


def shipped(trees: Mapping[str, ast.Module]) -> Modules:
    """Return the modules that are shipped, of syntax trees by path."""
    found = {}
    for path, tree in trees.items():
        name = path.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
        if name.startswith("gpuscore"):
            found[name.removesuffix(".__init__")] = tree
    return found


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
    complaints = [
        *long_files({path: len(source.splitlines()) for path, source in sources.items()}),
        *(bad for path, tree in trees.items() for bad in riddles(path, tree)),
        *repeated_classes(modules),
        *import_circles(modules),
    ]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
