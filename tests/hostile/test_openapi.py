"""Promise: the OpenAPI document is true.

Schemathesis generates valid and invalid requests from it and compares every answer with it: status,
content type, headers and body, and no 5xx.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.serving import serving
from support.vitals import Patient

pytestmark = pytest.mark.hostile

HERE = Path(__file__).parent
PROGRAM = os.environ.get("SCHEMATHESIS", "schemathesis")  # make test-hostile installs it
SECONDS = 75
KEY = "key-of-alice"


@pytest.mark.parametrize("key", [None, KEY], ids=["without a key", "with a key"])
def test_every_operation(
    key: str | None,
    patient_of: Callable[..., Patient],
    record_property: Callable[[str, object], None],
    tmp_path: Path,
) -> None:
    environment = {"GPUSCORE_API_KEY": key} if key else {}
    log = tmp_path / "log"
    with serving("demo", "--threads", "1", environment=environment, log=log, fork=False) as server:
        patient = patient_of(server, key)
        command = [PROGRAM, "--config-file", HERE / "schemathesis.toml", "--no-color", "run"]
        command += [f"{server.url}/openapi.json", "--max-time", str(SECONDS)]
        command += ["--continue-on-failure", "--request-timeout", "20"]
        if key:
            command += ["--header", f"Authorization: Bearer {key}"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(HERE)},
            capture_output=True,
            text=True,
            timeout=3 * SECONDS,
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
        patient.check("Schemathesis")
    assert "Traceback" not in log.read_text()
    record_property("said", f"Schemathesis, key: {bool(key)}: {_figures(done.stdout)}")


def _figures(output: str) -> str:
    (operations,) = re.findall(r"Tested: (\d+)", output)
    (cases,) = re.findall(r"(\d+) generated", output)
    return f"{operations} operations, {cases} requests, nothing found"
