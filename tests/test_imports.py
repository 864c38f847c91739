"""The lines of ARCHITECTURE.md: who may import whom, and that kernels/ shadows nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "jax", "triton", "transformers", "fastapi", "starlette", "uvicorn", "tokenizers"}
HEAVY |= {"prometheus_client", "opentelemetry", "httpx"}

# module or package -> what of gpuscore and of HEAVY it may import (prefixes)
ALLOWED = {
    "gpuscore.__main__": {"gpuscore.cli"},
    "gpuscore.types": set(),
    "gpuscore.errors": set(),
    "gpuscore.config": {"gpuscore.errors"},
    "gpuscore.model_files": {"gpuscore.errors"},
    "gpuscore.options": {"gpuscore.config", "gpuscore.errors"},
    "gpuscore.flags": {"gpuscore.config", "gpuscore.errors", "gpuscore.options"},
    "gpuscore.settings": {"gpuscore.config", "gpuscore.errors", "gpuscore.options"},
    "gpuscore.hub": {"gpuscore.errors"},
    "gpuscore.engine": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.config",
        "gpuscore.engine",
        "gpuscore.backends.base",
    },
    # A backend by its name only.
    "gpuscore.worker": {"gpuscore.engine", "gpuscore.server.log"},
    "gpuscore.text": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.model_files",
        "gpuscore.config",
        "gpuscore.text",
        "tokenizers",
    },
    "gpuscore.families": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.model_files",
        "gpuscore.text",
        "gpuscore.families",
    },
    "gpuscore.server": {
        "gpuscore",  # the package itself: its version
        "gpuscore.families",
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.config",
        "gpuscore.engine",
        "gpuscore.text",
        "gpuscore.server",
        "fastapi",
        "starlette",
        "uvicorn",
        "prometheus_client",
    },
    # Imported on demand only: what they need is an extra.
    "gpuscore.server.spans": {"gpuscore", "gpuscore.server", "opentelemetry"},
    "gpuscore.server.tracing": {
        "gpuscore",
        "gpuscore.config",
        "gpuscore.errors",
        "gpuscore.server",
        "opentelemetry",
    },
    "gpuscore.backends.base": {"gpuscore.types"},
    "gpuscore.backends.shared": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.model_files",
        "gpuscore.config",
        "gpuscore.backends.shared",
    },
    "gpuscore.backends.torch": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.config",
        "gpuscore.backends.base",
        "gpuscore.backends.shared",
        "gpuscore.backends.torch",
        "gpuscore_kernels",
        "torch",
    },
    "gpuscore.backends.jax": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.config",
        "gpuscore.backends.base",
        "gpuscore.backends.shared",
        "gpuscore.backends.jax",
        "jax",
    },
    # A machine that only asks needs neither torch nor the server.
    "gpuscore.client": {"gpuscore.config", "gpuscore.types", "gpuscore.client", "httpx"},
    "gpuscore.parity": {
        "gpuscore.types",
        "gpuscore.errors",
        "gpuscore.model_files",
        "gpuscore.config",
        "gpuscore.options",
        "gpuscore.flags",
        "gpuscore.settings",
        "gpuscore.hub",
        "gpuscore.scorer",
        "gpuscore.backends",
        "gpuscore.parity",
        "tokenizers",
    },
    # What the command line imports at every start.
    "gpuscore.parity.arguments": {
        "gpuscore.config",
        "gpuscore.flags",
        "gpuscore.settings",
        "gpuscore.parity.commands",
        "gpuscore.parity.check_server",
    },
    "gpuscore.parity.metrics": {"gpuscore.types"},
    "gpuscore.parity.machine": {"torch", "jax"},
    "gpuscore.parity.oracle": {"gpuscore.errors", "gpuscore.parity", "torch", "transformers"},
    "gpuscore_kernels": {"gpuscore_kernels", "torch", "triton"},
}


def modules():
    for base in (ROOT, ROOT / "kernels"):
        for path in sorted(base.glob("gpuscore*/**/*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(source):
    """Modules a file imports, by full name; `from a.b import c` counts as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def broken_lines(name, source):
    """Imports of a module that its row of ALLOWED does not grant."""
    rows = [prefix for prefix in ALLOWED if name == prefix or name.startswith(prefix + ".")]
    if not rows:
        return []
    granted = ALLOWED[max(rows, key=len)]
    return [
        target
        for target in imports(source)
        if target.split(".")[0] in HEAVY | {"gpuscore", "gpuscore_kernels"}
        and not any(target == g or target.startswith(g + ".") for g in granted - {"gpuscore"})
        and not (target == "gpuscore" and "gpuscore" in granted)
    ]


def test_imports_go_one_way():
    found = {name: bad for name, path in modules() if (bad := broken_lines(name, path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpuscore.engine.planner", "import torch"),
        ("gpuscore.engine.engine", "from gpuscore.backends.torch import backend"),
        ("gpuscore.server.app", "from gpuscore.backends import create_backend"),
        ("gpuscore.worker", "from gpuscore.backends import prepare"),
        ("gpuscore.types", "from gpuscore.errors import InvalidRequest"),
        ("gpuscore_kernels.label_head.api", "from gpuscore.types import PackedBatch"),
        ("gpuscore.backends.torch.backend", "from gpuscore.engine.planner import pack"),
        ("gpuscore.backends.jax.backend", "import torch"),
        ("gpuscore.backends.jax.backend", "from gpuscore.backends.torch.plan import plan_backend"),
        ("gpuscore.backends.shared.plan", "import torch"),
        ("gpuscore.parity.gates", "import torch"),
        ("gpuscore.client.jobs", "from gpuscore.server.schema import ScoreAnswer"),
        ("gpuscore.server.app", "import httpx"),
        ("gpuscore.parity.oracle", "from gpuscore.scorer import Scorer"),
    ],
)
def test_a_wrong_import_is_seen(name, line):
    assert broken_lines(name, line)


def test_every_module_has_its_row():
    """What may import everything is listed here, so that a new module is placed on purpose."""
    free = {"gpuscore", "gpuscore.cli", "gpuscore.scorer", "gpuscore.backends", "gpuscore.models"}
    for name, _ in modules():
        placed = any(name == row or name.startswith(row + ".") for row in ALLOWED)
        assert placed or name in free or name.startswith("gpuscore.models."), name


def test_implementations_do_not_import_the_reference():
    for name, path in modules():
        if name.startswith("gpuscore_kernels.") and not name.endswith((".api", ".reference")):
            found = [t for t in imports(path.read_text()) if t.endswith(".reference")]
            assert not found, name


def python(code, *flags, cwd=ROOT):
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_is_no_package():
    """PyPI has a package `kernels` that transformers probes; ours must never answer for it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "import importlib.util as u\n"
        "s = u.find_spec('kernels')\n"
        "assert s is None or s.origin is None, s\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(type(is_kernels_available()).__name__)"
    )
    assert python(code) == "bool"


def test_importing_gpuscore_is_light():
    code = (
        "import sys, gpuscore{}; print(sorted({{'torch', 'fastapi', 'numpy'}} & set(sys.modules)))"
    )
    assert python(code.format("")) == "[]"
    assert python(code.format(".cli")) == "[]"
    first = "import sys, gpuscore.__main__; print('gpuscore.cli' in sys.modules)"
    assert python(first) == "False", "signals are taken care of before the rest is imported"


def test_the_client_needs_neither_a_framework_nor_the_server():
    unwanted = HEAVY - {"httpx"} | {"gpuscore.server", "gpuscore.engine"}
    code = f"import sys, gpuscore.client; print(sorted({unwanted!r} & set(sys.modules)))"
    assert python(code) == "[]"
