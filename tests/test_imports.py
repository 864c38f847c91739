"""Promise: imports follow the table of ARCHITECTURE.md, and kernels/ shadows no package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "jax", "triton", "transformers", "fastapi", "starlette", "uvicorn", "tokenizers"}
HEAVY |= {"prometheus_client", "opentelemetry", "httpx", "pyarrow", "scipy", "ir_measures", "ray"}

# Plain data that crosses boundaries.
DATA = {
    "gpuscore.arrays",
    "gpuscore.batch",
    "gpuscore.distinct",
    "gpuscore.errors",
    "gpuscore.item_errors",
    "gpuscore.label_nodes",
    "gpuscore.label_trie",
    "gpuscore.limits",
    "gpuscore.request",
    "gpuscore.stats",
}
# Granted alone, without the modules below.
EXACT = {"gpuscore", "gpuscore.config"}

# module or package -> the modules of gpuscore and of HEAVY that it may import (prefixes)
ALLOWED = {
    "gpuscore.__main__": {"gpuscore.cli"},
    "gpuscore.arrays": set(),
    "gpuscore.batch": {"gpuscore.arrays"},
    "gpuscore.distinct": {"gpuscore.arrays", "gpuscore.request"},
    "gpuscore.errors": set(),
    "gpuscore.item_errors": {"gpuscore.errors"},
    "gpuscore.label_nodes": DATA,
    "gpuscore.label_trie": {"gpuscore.arrays"},
    "gpuscore.limits": set(),
    "gpuscore.request": {"gpuscore.arrays", "gpuscore.label_trie"},
    "gpuscore.stats": set(),
    "gpuscore.heap": set(),
    "gpuscore.log": set(),
    "gpuscore.model_files": {"gpuscore.errors"},
    "gpuscore.probabilities": {"gpuscore.arrays", "gpuscore.errors", "gpuscore.request"},
    "gpuscore.calibration": {
        "gpuscore.arrays",
        "gpuscore.errors",
        "gpuscore.model_files",
        "gpuscore.probabilities",
    },
    "gpuscore.decision_reads": {*DATA, "gpuscore.calibration", "gpuscore.probabilities"},
    "gpuscore.calibrate": {
        *DATA,
        "gpuscore.calibrate",
        "gpuscore.calibration",
        "gpuscore.config",
        "gpuscore.config.served",
        "gpuscore.config.sources",
        "gpuscore.decision_reads",
        "gpuscore.hub",
        "gpuscore.offline",
        "gpuscore.probabilities",
        "gpuscore.prompts",
        "gpuscore.reports",
        "gpuscore.server.api",
    },
    "gpuscore.calibrate.arguments": {  # the command line imports this at every start
        "gpuscore.calibrate.command",
        "gpuscore.config",
        "gpuscore.config.flags",
        "gpuscore.config.parser",
        "gpuscore.config.sources",
    },
    "gpuscore.config": {"gpuscore.config", "gpuscore.config.fields"},
    "gpuscore.config.field": set(),
    "gpuscore.config.fields": {"gpuscore.config.field"},
    "gpuscore.config.options": {"gpuscore.config", "gpuscore.errors"},
    "gpuscore.config.flags": {"gpuscore.config", "gpuscore.config.options", "gpuscore.errors"},
    "gpuscore.config.labels": {"gpuscore.errors"},
    "gpuscore.config.parser": {"gpuscore.config.fields"},
    "gpuscore.config.examples": set(),
    "gpuscore.config.sources": {"gpuscore.config", "gpuscore.config.options", "gpuscore.errors"},
    "gpuscore.config.served": {
        "gpuscore.config.fields",
        "gpuscore.config.sources",
        "gpuscore.errors",
        "gpuscore.hub",
    },
    "gpuscore.other_formats": {"gpuscore.errors", "gpuscore.model_files"},
    "gpuscore.hub": {"gpuscore.errors", "gpuscore.other_formats"},
    "gpuscore.engine": {*DATA, "gpuscore.config", "gpuscore.engine", "gpuscore.backends.base"},
    # The worker imports a backend only by its name.
    "gpuscore.worker": {
        *DATA,
        "gpuscore.backends.base",
        "gpuscore.config",
        "gpuscore.engine",
        "gpuscore.heap",
        "gpuscore.log",
        "gpuscore.worker",
    },
    "gpuscore.announcement": {
        "gpuscore.backends.common",
        "gpuscore.errors",
        "gpuscore.limits",
        "gpuscore.prompts",
        "gpuscore.text",
    },
    "gpuscore.loading_bar": {"gpuscore.limits"},
    "gpuscore.info": {
        "gpuscore.backends",
        "gpuscore.config",
        "gpuscore.config.options",
        "gpuscore.config.served",
        "gpuscore.config.sources",
        "gpuscore.errors",
        "gpuscore.hub",
        "gpuscore.prompts",
        "gpuscore.replicas.placement",
        "gpuscore.shares_table",
    },
    "gpuscore.doctor": {
        "gpuscore",  # the package itself, for its version
        "gpuscore.backends",
        "gpuscore.config",
        "gpuscore.config.sources",
        "gpuscore.doctor",
        "gpuscore.errors",
        "gpuscore.server.api.auth",
        "gpuscore.server.http.address",
        "torch",
    },
    "gpuscore.questions": set(),
    "gpuscore.call_inputs": {"gpuscore.errors", "gpuscore.item_errors", "gpuscore.questions"},
    "gpuscore.call_options": {"gpuscore.call_inputs", "gpuscore.item_errors"},
    "gpuscore.results": {"gpuscore.arrays", "gpuscore.item_errors", "gpuscore.tables"},
    "gpuscore.tables": {"gpuscore.errors"},
    "gpuscore.offline": {
        *DATA,
        "gpuscore.backends",
        "gpuscore.call_inputs",
        "gpuscore.call_options",
        "gpuscore.config",
        "gpuscore.config.options",
        "gpuscore.decision_reads",
        "gpuscore.engine",
        "gpuscore.hub",
        "gpuscore.offline",
        "gpuscore.probabilities",
        "gpuscore.prompts",
        "gpuscore.questions",
        "gpuscore.results",
        "gpuscore.text",
    },
    "gpuscore.scorer": {
        *DATA,
        "gpuscore.call_options",
        "gpuscore.engine.ticket",
        "gpuscore.offline",
        "gpuscore.questions",
        "gpuscore.results",
    },
    "gpuscore.async_scorer": {
        "gpuscore.call_options",
        "gpuscore.item_errors",
        "gpuscore.offline",
        "gpuscore.questions",
        "gpuscore.results",
    },
    "gpuscore.replicas": {
        *DATA,
        "gpuscore.backends.common.plan",
        "gpuscore.config",
        "gpuscore.engine",
        "gpuscore.log",
        "gpuscore.replicas",
        "gpuscore.worker",
    },
    # The parts of a server of several processes: both sides of what joins them.
    "gpuscore.fronts": {
        *DATA,
        "gpuscore.config",
        "gpuscore.engine",
        "gpuscore.fronts",
        "gpuscore.replicas",
        "gpuscore.server",
        "gpuscore.worker",
    },
    "gpuscore.ray": {
        *DATA,
        "gpuscore",  # the package itself, for its version
        "gpuscore.config",
        "gpuscore.config.field",
        "gpuscore.config.options",
        "gpuscore.config.served",
        "gpuscore.config.sources",
        "gpuscore.engine",
        "gpuscore.heap",
        "gpuscore.hub",
        "gpuscore.log",
        "gpuscore.ray",
        "gpuscore.replicas",
        "gpuscore.server",
        "gpuscore.serving",
        "gpuscore.worker",
        "ray",
        "starlette",
    },
    "gpuscore.text": {
        *DATA,
        "gpuscore.config",
        "gpuscore.model_files",
        "gpuscore.text",
        "tokenizers",
    },
    "gpuscore.prompts": {
        *DATA,
        "gpuscore.calibration",
        "gpuscore.config",
        "gpuscore.decision_reads",
        "gpuscore.model_files",
        "gpuscore.probabilities",
        "gpuscore.prompts",
        "gpuscore.text",
    },
    "gpuscore.server": {
        *DATA,
        "gpuscore",  # the package itself, for its version
        "gpuscore.config",
        "gpuscore.config.served",
        "gpuscore.decision_reads",
        "gpuscore.engine",
        "gpuscore.heap",
        "gpuscore.log",
        "gpuscore.probabilities",
        "gpuscore.prompts",
        "gpuscore.server",
        "gpuscore.text",
        "fastapi",
        "starlette",
        "uvicorn",
        "prometheus_client",
    },
    # Imported on demand only, because they need an extra.
    "gpuscore.server.observe.spans": {"gpuscore", "gpuscore.server", "opentelemetry"},
    "gpuscore.server.observe.tracing": {
        "gpuscore",
        "gpuscore.config",
        "gpuscore.errors",
        "gpuscore.server",
        "opentelemetry",
    },
    "gpuscore.backends.needs": {"gpuscore.backends", "gpuscore.config", "gpuscore.errors"},
    "gpuscore.shares_table": {
        "gpuscore.backends.common.plan",
        "gpuscore.config",
        "gpuscore.config.served",
        "gpuscore.hub",
        "gpuscore.replicas",
    },
    "gpuscore.backends.base": {"gpuscore.batch", "gpuscore.limits"},
    "gpuscore.backends.common": {
        *DATA,
        "gpuscore.backends.base",
        "gpuscore.backends.common",
        "gpuscore.config",
        "gpuscore.heap",
        "gpuscore.model_files",
    },
    "gpuscore.backends.torch": {
        *DATA,
        "gpuscore.backends.base",
        "gpuscore.backends.common",
        "gpuscore.backends.torch",
        "gpuscore.config",
        "gpuscore.heap",
        "gpuscore_kernels",
        "torch",
    },
    "gpuscore.backends.jax": {
        *DATA,
        "gpuscore.backends.base",
        "gpuscore.backends.common",
        "gpuscore.backends.jax",
        "gpuscore.config",
        "jax",
    },
    # A machine that only sends requests needs neither torch nor the server.
    "gpuscore.client": {
        "gpuscore.arrays",
        "gpuscore.call_inputs",
        "gpuscore.call_options",
        "gpuscore.client",
        "gpuscore.config",
        "gpuscore.errors",
        "gpuscore.item_errors",
        "gpuscore.questions",
        "gpuscore.results",
        "httpx",
    },
    "gpuscore.parity": {
        *DATA,
        "gpuscore.backends",
        "gpuscore.config",
        "gpuscore.config.flags",
        "gpuscore.config.options",
        "gpuscore.config.sources",
        "gpuscore.hub",
        "gpuscore.model_files",
        "gpuscore.parity",
        "gpuscore.reports",
        "gpuscore.results",
        "gpuscore.scorer",
        "tokenizers",
    },
    # The command line imports this at every start.
    "gpuscore.parity.arguments": {
        "gpuscore.config",
        "gpuscore.config.examples",
        "gpuscore.config.flags",
        "gpuscore.config.parser",
        "gpuscore.config.sources",
        "gpuscore.parity.commands",
        "gpuscore.parity.compare",
        "gpuscore.parity.conformance.check_server",
        "gpuscore.parity.trace",
    },
    "gpuscore.parity.metrics": {"gpuscore.arrays"},
    "gpuscore.parity.machine": {"torch", "jax"},
    "gpuscore.parity.oracle": {
        "gpuscore.backends.torch.devices",  # which device; it computes nothing
        "gpuscore.errors",
        "gpuscore.parity",
        "torch",
        "transformers",
    },
    # Its composition root, `command`, starts the engine as `gpuscore.serving` does.
    "gpuscore.bulk": {
        *DATA,
        "gpuscore.bulk",
        "gpuscore.config.labels",
        "gpuscore.probabilities",
        "gpuscore.prompts",
        "gpuscore.server.api.dialects",
        "gpuscore.server.api.errors",
        "gpuscore.server.observe.record",
        "gpuscore.server.served",
        "gpuscore.server.service",
        "gpuscore.text",
    },
    "gpuscore.bulk.arguments": {  # the command line imports this at every start
        "gpuscore.bulk.command",
        "gpuscore.bulk.options",
        "gpuscore.config",
        "gpuscore.config.flags",
        "gpuscore.config.labels",
        "gpuscore.config.parser",
        "gpuscore.config.sources",
    },
    "gpuscore.bulk.command": {
        "gpuscore",  # the package itself, for its version
        "gpuscore.bulk",
        "gpuscore.config",
        "gpuscore.config.served",
        "gpuscore.config.sources",
        "gpuscore.errors",
        "gpuscore.hub",
        "gpuscore.loading_bar",
        "gpuscore.server.served",
        "gpuscore.serving",
    },
    "gpuscore.bulk.engines": {
        "gpuscore.config",
        "gpuscore.errors",
        "gpuscore.ray.bulk",  # on demand: it needs an extra
        "gpuscore.replicas",
    },
    # The engines of bulk jobs on a Ray cluster, in the place of processes of this machine.
    "gpuscore.ray.bulk": {
        *DATA,
        "gpuscore",  # the package itself, for its version
        "gpuscore.config",
        "gpuscore.engine",
        "gpuscore.hub",
        "gpuscore.ray.bulk",
        "gpuscore.replicas",
        "gpuscore.worker",
        "ray",
    },
    "gpuscore.ray.columns": {"gpuscore.call_inputs", "gpuscore.scorer"},
    "gpuscore.bulk.parquet": {"gpuscore.arrays", "gpuscore.bulk", "gpuscore.errors", "pyarrow"},
    "gpuscore.reports": {"gpuscore.errors"},
    # Measures and texts only; its `targets` open a model or a client, its `command` joins all.
    "gpuscore.evaluation": {
        "gpuscore.arrays",
        "gpuscore.errors",
        "gpuscore.evaluation",
        "gpuscore.reports",
    },
    "gpuscore.evaluation.arguments": {  # the command line imports this at every start
        "gpuscore.config",
        "gpuscore.config.flags",
        "gpuscore.config.parser",
        "gpuscore.config.sources",
        "gpuscore.errors",
        "gpuscore.evaluation.command",
    },
    "gpuscore.evaluation.records": {"gpuscore.errors", "pyarrow"},
    "gpuscore.evaluation.measures": {
        "gpuscore.arrays",
        "gpuscore.errors",
        "gpuscore.evaluation",
        "gpuscore.reports",
        "ir_measures",
        "scipy",
    },
    "gpuscore.evaluation.targets": {
        "gpuscore.client",
        "gpuscore.config",
        "gpuscore.config.options",
        "gpuscore.errors",
        "gpuscore.evaluation",
        "gpuscore.hub",
        "gpuscore.scorer",
    },
    "gpuscore.evaluation.command": {
        "gpuscore",  # the package itself, for its version
        "gpuscore.config",
        "gpuscore.config.served",
        "gpuscore.config.sources",
        "gpuscore.errors",
        "gpuscore.evaluation",
        "gpuscore.parity.machine",
    },
    "gpuscore_kernels": {"gpuscore_kernels", "torch", "triton"},
}


def modules():
    for base in (ROOT, ROOT / "kernels"):
        for path in sorted(base.glob("gpuscore*/**/*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(source):
    """Yield the modules that a file imports, by full name; `from a.b import c` counts as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def broken_lines(name, source):
    """Return a module's imports that its row of ALLOWED does not grant."""
    rows = [prefix for prefix in ALLOWED if name == prefix or name.startswith(prefix + ".")]
    if not rows:
        return []
    granted = ALLOWED[max(rows, key=len)]
    prefixes = tuple(f"{name}." for name in granted - EXACT)
    return [
        target
        for target in imports(source)
        if target.split(".")[0] in HEAVY | {"gpuscore", "gpuscore_kernels"}
        and target not in granted
        and not target.startswith(prefixes)
    ]


def test_imports_go_one_way():
    found = {name: bad for name, path in modules() if (bad := broken_lines(name, path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpuscore.engine.draft", "import torch"),
        ("gpuscore.engine.engine", "from gpuscore.backends.torch import backend"),
        ("gpuscore.engine.engine", "from gpuscore.worker.client import EngineClient"),
        ("gpuscore.engine.engine", "from gpuscore.config.sources import read_settings"),
        ("gpuscore.server.api.app", "from gpuscore.backends import create_backend"),
        ("gpuscore.server.api.app", "import httpx"),
        ("gpuscore.worker.__main__", "from gpuscore.backends import prepare"),
        ("gpuscore.worker.child", "from gpuscore.server.service import ScoringService"),
        ("gpuscore.server.run", "from gpuscore.fronts.front import Seat"),
        ("gpuscore.worker.link", "from gpuscore.fronts.board import Board"),
        ("gpuscore.fronts.front", "import torch"),
        ("gpuscore.batch", "from gpuscore.errors import InvalidRequest"),
        ("gpuscore_kernels.label_head.api", "from gpuscore.batch import PackedBatch"),
        ("gpuscore.backends.torch.backend", "from gpuscore.engine.draft import draft_batch"),
        ("gpuscore.backends.jax.backend", "import torch"),
        ("gpuscore.backends.jax.backend", "from gpuscore.backends.torch.plan import plan_backend"),
        ("gpuscore.backends.common.plan", "import torch"),
        ("gpuscore.parity.gates", "import torch"),
        ("gpuscore.client.calls", "from gpuscore.server.api.dialects.score import ScoreAnswer"),
        ("gpuscore.parity.oracle", "from gpuscore.scorer import Scorer"),
        ("gpuscore.ray.host", "import torch"),
        ("gpuscore.server.run", "import ray"),
        ("gpuscore.bulk.json_lines", "import pyarrow"),
        ("gpuscore.bulk.job", "from gpuscore.worker.client import EngineClient"),
        ("gpuscore.bulk.engines", "import ray"),
    ],
)
def test_a_wrong_import_is_seen(name, line):
    assert broken_lines(name, line)


def test_every_module_has_its_row():
    """Modules that may import everything are listed here, so that every new module gets a row."""
    free = {"gpuscore", "gpuscore.cli", "gpuscore.serving", "gpuscore.backends"}
    for name, _ in modules():
        placed = any(name == row or name.startswith(row + ".") for row in ALLOWED)
        assert placed or name in free, name


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
    """transformers probes for PyPI's package `kernels`; our folder must not be found in its
    place."""
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
