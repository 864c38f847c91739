"""Promise: every kernel compiles for every architecture, and the check refuses what does not
fit."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gpuscore_kernels.compile_check import (
    PACKAGE,
    REGISTER_GROWTH,
    SHARED_LIMIT,
    CompiledCode,
    check,
    complaints,
    keys,
    label,
    measure_all,
    read_baseline,
)
from gpuscore_kernels.variant import ARCHES, Variant

MOST_QUICK = 45  # variants in make test-all; all of them are compiled by make check-kernels-all
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
)


@needs_triton
def test_one_variant_of_each_kernel_compiles(capsys):
    quick = {key[0]: key for key in keys(quick=True)}
    baselines = {kernel: read_baseline(kernel) for kernel in quick}
    failed = check(measure_all([*quick.values()], processes=1), baselines)
    assert failed == 0, capsys.readouterr().out


@needs_triton
@pytest.mark.slow
def test_shipped_variants_compile():
    assert len(list(keys(quick=True))) <= MOST_QUICK
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpuscore_kernels.compile_check", "--processes", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(list(keys(quick=True)))
    assert done.stdout.splitlines()[-1] == f"{count} variants compiled, 0 failed"


@needs_triton
def test_every_kernel_is_among_the_quick_ones_and_all_rows_have_owners():
    every = list(keys(quick=False))
    assert {key[0] for key in keys(quick=True)} == {
        path.parent.name for path in PACKAGE.glob("*/triton.py")
    }
    for kernel in {key[0] for key in every}:
        assert set(read_baseline(kernel)) == {label(key) for key in every if key[0] == kernel}


VARIANT = Variant("v", None, {}, {}, (), 4, 2, needs_wgmma=True, stack={80: 16})
GOOD = CompiledCode(registers=100, stack=0, shared=1000, hgmma=4, hmma=0)
KNOWN = {"registers": 100}


def test_what_fits_is_accepted():
    for arch in ARCHES:
        assert complaints(VARIANT, arch, GOOD, KNOWN) == []
    assert complaints(VARIANT, 80, replace(GOOD, stack=16), KNOWN) == []
    assert complaints(VARIANT, 80, replace(GOOD, hgmma=0), KNOWN) == []
    at_limit = replace(GOOD, shared=SHARED_LIMIT[89], registers=int(100 * REGISTER_GROWTH))
    assert complaints(VARIANT, 89, at_limit, KNOWN) == []


@pytest.mark.parametrize(
    ("arch", "change", "known", "message"),
    [
        (80, {"stack": 24}, KNOWN, "24 bytes of stack, allowed: 16"),
        (90, {"stack": 8}, KNOWN, "8 bytes of stack, allowed: 0"),
        (120, {"shared": SHARED_LIMIT[120] + 1}, KNOWN, "shared memory"),
        (90, {"hgmma": 0}, KNOWN, "no HGMMA"),
        (80, {"registers": 111}, KNOWN, "111 registers, 100 before"),
        (80, {}, None, "not in compile_baseline.json"),
    ],
)
def test_what_does_not_is_refused(arch, change, known, message):
    (complaint,) = complaints(VARIANT, arch, replace(GOOD, **change), known)
    assert message in complaint
