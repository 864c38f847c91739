"""Promise: every kernel compiles for every architecture into code that is as good as its baseline,
with the Triton of the tests and with the image's; what does not is refused."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from gpuscore_kernels.variant import ARCHES
from kernel_code.check import (
    BASELINES,
    PACKAGE,
    check,
    keys,
    label,
    measure_all,
    read_baseline,
    variants,
)
from kernel_code.compiled import facts_of, fingerprint, tool, triton_version

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "kernels"  # as in make check-kernels
MOST_QUICK = (
    82  # variants in make test-all; all of them are compiled by make check-kernels ARGS=--all
)
LOCK = (ROOT / "docker" / "locks" / "cuda.txt").read_text(encoding="utf-8")
IMAGE_TRITON = re.findall(r"^triton==(\S+)", LOCK, re.MULTILINE)[0]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
)
PYTHONS = {
    "of the tests": Path(sys.executable),
    "of the image": ROOT / f".venv-triton-{IMAGE_TRITON}" / "bin" / "python",
}


@needs_triton
def test_one_variant_of_each_kernel_compiles(capsys):
    quick = {key[0]: key for key in keys(quick=True)}
    baselines = {kernel: read_baseline(kernel, triton_version()) for kernel in quick}
    failed = check(measure_all([*quick.values()], 1, CACHE), baselines)
    assert failed == 0, capsys.readouterr().out


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("which", PYTHONS)
def test_shipped_variants_compile(which):
    if not PYTHONS[which].exists():
        pytest.skip(f"needs {PYTHONS[which]}, which make check-kernels makes")
    version = triton_version() if which == "of the tests" else IMAGE_TRITON
    count = len(list(keys(quick=True, version=version)))
    assert count <= MOST_QUICK
    paths = map(str, (ROOT, PACKAGE.parent, ROOT / "tools"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [PYTHONS[which], "-P", "-m", "kernel_code", "--processes", "1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Triton {version}: {count} variants, 0 failed"


@needs_triton
def test_every_kernel_is_among_the_quick_ones_and_all_rows_have_owners():
    every = list(keys(quick=False))
    folders = {path.parent.name for path in PACKAGE.glob("*/triton.py")}
    assert {key[0] for key in keys(quick=True)} == folders
    for kernel in folders:
        names = {label(key) for key in every if key[0] == kernel}
        for version in (triton_version(), IMAGE_TRITON):
            assert set(read_baseline(kernel, version)) == names, (kernel, version)


@needs_triton
def test_the_variants_nearest_to_spilling_are_among_the_quick_ones():
    """Find the code of every function that leaves the fewest registers; none of it spills."""
    for version in (triton_version(), IMAGE_TRITON):
        quick = set(keys(quick=True, version=version))
        for kernel, name, arch in keys(quick=False):
            variant, rows = variants(kernel)[name], read_baseline(kernel, version)
            row = rows[label((kernel, name, arch))]
            assert row["stack"] <= variant.stack.get(arch, 0), (version, kernel, name, arch)
            alike = [
                rows[label(key)]["registers"]
                for key in quick
                if key[0] == kernel and variants(kernel)[key[1]].kernel is variant.kernel
            ]
            assert row["registers"] <= max(alike), (version, kernel, name, arch)


def test_there_are_baselines_for_the_versions_that_may_be_installed_and_no_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (tests,) = [line for line in extras["dev"] if line.startswith("triton")]
    (image,) = [line for line in extras["cuda"] if line.startswith("triton")]
    assert image == f"triton=={IMAGE_TRITON}"
    versions = {IMAGE_TRITON, tests.removeprefix("triton==").split(";")[0]}
    folders = {path.parent.name for path in PACKAGE.glob("*/triton.py")}
    names = {path.name for path in BASELINES.iterdir()}
    assert names == {f"{kernel}.{version}.json" for kernel in folders for version in versions}


def test_the_page_has_the_numbers_of_the_baselines():
    page = (ROOT / "docs" / "explanation" / "kernel-checks.md").read_text(encoding="utf-8")
    headers = {
        "pool": "for index in tl.range(pool_begin, pool_end)",
        "packed": "for index in tl.range(0, num_packed)",
    }
    rows = re.findall(r"^\| (3\S+) \| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for version, registers, cells in rows:
        shared, loop, *numbers = cells.split(" | ")
        known = read_baseline("extend_attention", version)[
            "bf16 dim=128 group=2 64x64 stages=3 carry sm_90"
        ]
        assert (known["registers"], known["shared"]) == (int(registers), int(shared))
        loop_facts = known["loops"][headers[loop]]
        wanted = [loop_facts[name] for name in ("in_flight", "issue", "products", "mufu")]
        assert wanted == [int(number) for number in numbers]


@needs_triton
@pytest.mark.parametrize("name", ["ptxas", "ptxas-blackwell", "nvdisasm", "cuobjdump"])
def test_tritons_wheel_has_the_programs(name):
    assert "Cuda compilation tools" in tool(name, "--version")


@pytest.mark.slow
@needs_triton
def test_facts_are_kept_by_source(tmp_path, monkeypatch):
    variant = variants("add_rms_norm")["width=1024 one_plus=False delta=False"]
    first = facts_of(variant, 90, tmp_path)
    (path,) = tmp_path.rglob("*.json")
    assert path.parent.name == triton_version()
    monkeypatch.setattr("kernel_code.compiled.compiled_facts", None)
    assert facts_of(variant, 90, tmp_path) == first


@needs_triton
def test_other_variants_have_other_fingerprints():
    variant = variants("add_rms_norm")["width=1024 one_plus=False delta=False"]
    others = [
        *(fingerprint(variant, arch) for arch in ARCHES),
        fingerprint(replace(variant, num_stages=variant.num_stages + 1), 90),
        fingerprint(replace(variant, num_warps=2 * variant.num_warps), 90),
        fingerprint(replace(variant, divisible=()), 90),
        fingerprint(replace(variant, constexprs=dict(variant.constexprs) | {"WIDTH": 1}), 90),
        fingerprint(variants("gated")[next(iter(variants("gated")))], 90),
    ]
    assert len(set(others)) == len(others)
