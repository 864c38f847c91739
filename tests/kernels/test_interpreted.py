"""Promise: the kernels pass their tests in Triton's interpreter.

A pytest process of its own runs them, because Triton reads the flag at import.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("which", "least"),
    [("not slow", 100), pytest.param("slow", 10, marks=pytest.mark.slow)],
)
def test_kernels_in_the_interpreter(which, least):
    folder = Path(__file__).parent / "triton_interpreter"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
    command.append(str(folder))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed; loading takes a second
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > least
    assert "skipped" not in done.stdout
