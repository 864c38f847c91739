"""Promise: imports follow the table of ARCHITECTURE.md, and kernels/ shadows no package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "jax", "triton", "transformers", "fastapi", "starlette", "uvicorn", "tokenizers"}
HEAVY |= {"prometheus_client", "opentelemetry", "httpx", "pyarrow", "ir_measures", "ray"}

EXACT = {"gpuscore", "gpuscore.config"}  # granted alone, without the modules below

# A package or module: what it may import, of gpuscore and of HEAVY, besides itself, errors, types.
# The longest row that fits a module counts. A name grants all modules below it; "config", which has
# the defaults, grants itself alone, and "config." all of it.
ROWS = """\
system:
models:
config: config.
config.served: config. models.hub
prompts: config models text
text: config models tokenizers
dialects: config config.served prompts text
engine: backends.base
client: httpx dialects.answers dialects.wire
offline: backends config config.options engine models.hub prompts text
backends.base:
backends.common: backends.base config system models
backends.torch: backends.base backends.common config system gpuscore_kernels torch
backends.jax: backends.base backends.common config models jax
server: gpuscore config config.served dialects engine prompts system text fastapi starlette
  uvicorn prometheus_client
server.observe.spans: gpuscore dialects server opentelemetry
server.observe.tracing: gpuscore config server system.extras opentelemetry
processes.announcement: backends.common dialects processes.worker prompts text
processes.worker: backends.base config engine system
processes.replicas: backends.common.estimate backends.common.memory backends.common.plan config.
  engine system processes.worker
ray: gpuscore config. dialects engine models.hub processes system server ray starlette
ray.columns: offline.results offline.scorer
measure: backends config config.flags config.sources models measure offline system.machine httpx
measure.agreement: measure.intervals measure.results measure.workload
measure.arguments: config config.examples config.flags config.sources
measure.gates: measure.agreement measure.results
measure.oracle: backends.torch.devices config measure.results measure.workload models.hub
  system.extras torch transformers
measure.results: measure.workload
measure.workload: tokenizers
commands.info: backends config. models processes prompts text
commands.doctor: gpuscore backends config config.sources server.http.headers server.http.address
  system.extras gpuscore_kernels torch
commands.bulk: config config.options dialects system.extras
commands.bulk.options: commands.bulk config. models.files
commands.bulk.command: gpuscore commands.bulk config. dialects models.hub processes
  system.extras
commands.bulk.parquet: commands.bulk pyarrow
__main__: commands.cli
"""


def _table():
    """Return the names that each row grants, by the row's full name: modules, and what they begin
    with."""
    table = {}
    for line in ROWS.replace("\n  ", " ").strip().splitlines():
        row, _, granted = line.partition(":")
        names = {"errors", "exits", "types", *granted.split()}
        full = {n if n in HEAVY or n.startswith("gpuscore") else f"gpuscore.{n}" for n in names}
        table[f"gpuscore.{row}"] = full | {f"gpuscore.{row}"}
    return table


ALLOWED = {
    **_table(),
    "gpuscore.errors": set(),
    "gpuscore.exits": set(),
    "gpuscore.types": {"gpuscore.errors", "gpuscore.types"},
    "gpuscore.types.stats": set(),
    "gpuscore.types.batch": {"gpuscore.types.batch"},
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
    prefixes = tuple(f"{name.rstrip('.')}." for name in granted - EXACT)
    return [
        target
        for target in imports(source)
        if target.split(".")[0] in HEAVY | {"gpuscore", "gpuscore_kernels"}
        and target not in granted
        and f"{target}." not in granted
        and not target.startswith(prefixes)
    ]


def test_imports_go_one_way():
    broken = {
        name: bad for name, path in modules() if (bad := broken_lines(name, path.read_text()))
    }
    assert not broken


def test_every_module_has_its_row():
    """Modules that may import everything are listed here, so that every new module gets a row."""
    free = {"gpuscore", "gpuscore.backends", "gpuscore.commands", "gpuscore.commands.cli"}
    free |= {"gpuscore.measure", "gpuscore.processes", "gpuscore.processes.serving"}
    for name, _ in modules():
        placed = any(name == row or name.startswith(row + ".") for row in ALLOWED)
        assert placed or name in free, name


def test_implementations_do_not_import_the_reference():
    """Kernels take only types and constants of files with public functions and references.

    `strengths` is a formula of gates, which rules of all implementations share.
    """
    open_to_all = ("__init__.py", "api.py", "reference.py")
    files = {name: path for name, path in modules() if name.startswith("gpuscore_kernels")}
    others = {name for name, path in files.items() if path.name not in open_to_all}
    for name in others:
        for node in ast.walk(ast.parse(files[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in files.keys() - others:
                names = {alias.name for alias in node.names}
                names -= {name for name in names if f"{node.module}.{name}" in others}
                assert not any(map(str.islower, names - {"strengths"})), f"{name}: {names}"


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
    assert python(code.format(".commands.cli")) == "[]"
    first = "import sys, gpuscore.__main__; print('gpuscore.commands.cli' in sys.modules)"
    assert python(first) == "False", "signals are taken care of before the rest is imported"


def test_the_client_needs_neither_a_framework_nor_the_server():
    unwanted = HEAVY - {"httpx"} | {"gpuscore.server", "gpuscore.engine"}
    code = f"import sys, gpuscore.client; print(sorted({unwanted!r} & set(sys.modules)))"
    assert python(code) == "[]"


WITHOUT_SERVE = """\
import sys
from gpuscore.system.extras import SERVE

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in SERVE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize("command", ["serve demo", "doctor", "info demo", "batch demo"])
def test_a_command_without_the_extra_says_one_line(command, tmp_path):
    files = f"--input {ROOT / 'README.md'} --output {tmp_path / 'x'}" if "batch" in command else ""
    words = [*command.split(), *files.split()]
    run = f"from gpuscore.commands.cli import main; sys.exit(main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SERVE + run], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpuscore: this command needs ")
    assert re.search(r": pip install .*'torch<[\d.]+,>=[\d.]+'", line)


def test_without_the_extra_the_client_works_and_the_scorer_says_one_line():
    code = (
        "from gpuscore.client import Client\n"
        "try: from gpuscore import Scorer\n"
        "except ImportError as error: print(error)"
    )
    said = python(WITHOUT_SERVE + code)
    assert said.startswith("gpuscore.Scorer needs ")
    assert re.search(r": pip install .*'torch<[\d.]+,>=[\d.]+'", said)


def test_a_script_beside_the_checkout_imports_the_package(tmp_path):
    (tmp_path / "gpuscore").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import gpuscore; print(gpuscore.__version__)")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0.1.0\n", done.stderr
