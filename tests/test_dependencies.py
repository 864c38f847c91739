"""Promise: nothing in the tree runs code that arrives as data, and every dependency may be shipped.

Known vulnerabilities need the network: `sh docker/locks/audit.sh`.
"""

import ast
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(
    path for top in ("gpuscore", "kernels", "docker") for path in (ROOT / top).rglob("*.py")
)
# Modules that turn bytes into objects or code.
UNSAFE_MODULES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("multiprocessing", "code", "codeop", "imp", "runpy"),
}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__", "breakpoint"}
# The ends of dotted names: torch.load, numpy.load of objects, yaml.load, os.system.
UNSAFE_CALLS = {
    *("torch.load", "torch.jit.load", "torch.export.load", "torch.hub.load", "yaml.load"),
    *("yaml.unsafe_load", "os.system", "os.popen", "pd.read_pickle"),
}
# Each use with the reason why no stranger's data reaches it.
ALLOWED = {
    ("gpuscore/measure/arguments.py", "import_module"): "a module of the command, from its table",
    ("gpuscore/ray/__init__.py", "import_module"): "a module of the package, from its table",
    (
        "gpuscore/processes/worker/__main__.py",
        "import_module",
    ): "the backend's factory, from the server's own table",
}
# Licences that allow the images to be passed on. Look at any other licence before adding it.
PERMISSIVE = re.compile(
    r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|MPL|Mozilla|Unlicense|Zlib|CNRI-Python|0BSD"
    r"|Public Domain",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"(?<!L)GPL|AGPL|SSPL|Commons Clause|NonCommercial", re.IGNORECASE)


def name_of(node: ast.expr) -> str:
    """Return a dotted name, such as torch.load; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def unsafe_call(node: ast.Call) -> str | None:
    name = name_of(node.func)
    keywords = {word.arg: word.value for word in node.keywords}
    if name in UNSAFE_NAMES or name in UNSAFE_CALLS:
        return name
    if name.endswith(("np.load", "numpy.load")) and "allow_pickle" in keywords:
        return f"{name} with allow_pickle"
    for word in ("trust_remote_code", "shell"):
        value = keywords.get(word)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            return word
    if name.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
        return "import_module"
    return None


def unsafe(source: str) -> list[str]:
    """Return the names in a module that could run what it reads."""
    unsafe_names = []
    for node in ast.walk(ast.parse(source)):
        unsafe_names += [name for name in imports(node) if name.split(".")[0] in UNSAFE_MODULES]
        if isinstance(node, ast.Call) and (name := unsafe_call(node)):
            unsafe_names.append(name)
    return unsafe_names


def test_nothing_shipped_runs_data():
    assert len(SHIPPED) > 150
    names_by_file = {
        (str(path.relative_to(ROOT)), name)
        for path in SHIPPED
        for name in unsafe(path.read_text(encoding="utf-8"))
    }
    assert names_by_file == set(ALLOWED)


def needed() -> dict[str, set[str]]:
    """Return the licences of each package that serving installs, indirect dependencies included."""
    by_package: dict[str, set[str]] = {}
    waiting = ["gpuscore"]
    while waiting:
        name = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # a package for another platform
            continue
        by_package[name] = licences(package.metadata)
        for text in package.requires or []:
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": "serve"})
            if wanted and (other := canonicalize_name(requirement.name)) not in by_package:
                waiting.append(other)
    return by_package


def licences(metadata) -> set[str]:
    """Return the licences that a package names in any of the three places."""
    fields = metadata.get_all("Classifier") or []
    named = {field for field in fields if field.startswith("License ::")}
    for field in ("License-Expression", "License"):
        named |= {line[:200] for line in (metadata.get(field) or "").strip().splitlines()[:1]}
    return named


def test_every_dependency_may_be_shipped():
    licences_of = needed()
    assert len(licences_of) > 25
    doubtful = {
        name: named
        for name, named in licences_of.items()
        if not any(map(PERMISSIVE.search, named)) or any(map(COPYLEFT.search, named))
    }
    assert not doubtful
