"""Promise: the programs of `--backend jax` compile for TPU v5e and v6e, work in place and fit."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "docker" / "locks" / "tpu.txt").read_text(encoding="utf-8")
(LIBTPU,) = re.findall(r"^libtpu==(\S+)", LOCK, re.MULTILINE)
PYTHON = ROOT / f".venv-tpu-{LIBTPU}" / "bin" / "python"


@pytest.mark.slow
def test_shipped_programs_compile():
    if not PYTHON.exists():
        missing = f"needs {PYTHON}, which make check-tpu makes: NOTHING WAS COMPILED FOR A TPU"
        # .ci/run sets it, so that the gate cannot vanish there.
        if os.environ.get("REQUIRE_LIBTPU") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    path = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "tests"))
    done = subprocess.run(
        [PYTHON, "-P", "-m", "tpu_code.check", "--quick"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" MiB, ") == 4, done.stdout


def test_the_lock_has_the_jax_of_the_tests():
    """Another jaxlib beside this libtpu would make other code."""
    import jax

    locked = re.findall(r"^jax==(\S+)", LOCK, re.MULTILINE)[0]
    assert locked.rpartition(".")[0] == jax.__version__.rpartition(".")[0]
