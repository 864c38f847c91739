"""Promise: the programs of `--backend jax` compile for TPU v5e and v6e into code that is as good as
its baseline, and a defect that is planted in them is found."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "docker" / "locks" / "tpu.txt").read_text(encoding="utf-8")
(LIBTPU,) = re.findall(r"^libtpu==(\S+)", LOCK, re.MULTILINE)
PYTHON = ROOT / f".venv-tpu-{LIBTPU}" / "bin" / "python"
BASELINE = json.loads((ROOT / "tests" / "tpu_code" / "baseline.json").read_text(encoding="utf-8"))


def run(*arguments):
    if not PYTHON.exists():
        missing = f"needs {PYTHON}, which make check-tpu makes: NOTHING WAS COMPILED FOR A TPU"
        # .ci/run sets it, so that the gate cannot vanish there.
        if os.environ.get("REQUIRE_LIBTPU") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")))
    return subprocess.run(
        [PYTHON, "-P", "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_shipped_programs_compile():
    done = run("tpu_code.check", "--quick", "--processes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"libtpu-{LIBTPU}: 4 programs, 0 failed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_planted_defects_are_found():
    done = run("tpu_code.plants")
    assert done.returncode == 0, done.stdout + done.stderr
    refusals = json.loads(done.stdout.splitlines()[-1])
    assert refusals.pop("none") == []
    for defect, said in {
        "scatter": "pages are written row by row",
        "copy": "a copy of the pages: copy makes bf16",
        "not donated": "pool.pages is not updated in place",
    }.items():
        assert any(said in complaint for complaint in refusals.pop(defect)), (defect, done.stdout)
    assert not refusals


def test_the_baseline_has_what_make_test_all_compiles():
    names = [name for name in BASELINE if name.startswith("Qwen3-0.6B v6e extend")]
    assert any("16384 tokens" in name for name in names)
    assert any("64 tokens" in name for name in names)
    assert any(name.startswith("Qwen3-0.6B v5e extend 16384 tokens") for name in BASELINE)
    assert any(name.startswith("Qwen3.5-0.8B v6e extend 64 tokens") for name in BASELINE)
    for name, row in BASELINE.items():
        assert not row["layer"].get("scatter"), name


def test_the_lock_has_the_jax_of_the_tests():
    """Another jaxlib beside this libtpu would make other code."""
    import jax

    assert (
        re.findall(r"^jax==(\S+)", LOCK, re.MULTILINE)[0].rpartition(".")[0]
        == (jax.__version__.rpartition(".")[0])
    )
