"""Promise: every kernel that models launch compiles for the architectures that it is shipped for,
with the Triton of the tests and with the image's, and spills no more registers than is allowed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.slow import slow

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "docker" / "locks" / "cuda.txt").read_text(encoding="utf-8")
(IMAGE_TRITON,) = re.findall(r"^triton==(\S+)", LOCK, re.MULTILINE)
PYTHONS = {
    "of the tests": Path(sys.executable),
    "of the image": ROOT / f".venv-triton-{IMAGE_TRITON}" / "bin" / "python",
}


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
)
@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        ("of the tests", ("--model", "7 heads", "--only", "extend_attention")),
        *slow(("of the tests", ()), ("of the image", ())),
    ],
)
def test_kernels_compile(which, chosen):
    if not PYTHONS[which].exists():
        pytest.skip(f"needs {PYTHONS[which]}, which make check-kernels makes")
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "tests"))
    # Triton keeps what it has compiled.
    cache = {"TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton")}
    done = subprocess.run(
        [PYTHONS[which], "-P", "-m", "graphs.compiled", "--arch", "90", *chosen],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths} | cache,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " registers, " in done.stdout
    assert re.search(r"kernels, 0 failed$", done.stdout.rstrip()), done.stdout
