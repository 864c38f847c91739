"""Promise: the Triton kernels, in the interpreter, compute two of the real model's layers.

A pytest process of its own runs them, because Triton reads the flag at import.
"""

import os
import subprocess
import sys

from reference import MODEL, ROOT


def test_two_layers_in_the_interpreter():
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-c",
        "tests/real_model/interpreted/pytest.ini",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "REAL_MODEL": str(MODEL)}
    command.append("tests/real_model/interpreted")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout
