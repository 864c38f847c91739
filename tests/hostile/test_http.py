"""Promise: whatever bytes arrive, each request gets the right answer.

The requests are in `http/*.toml`; tests/server/test_corpus.py sends the quick ones with every run.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.changed_requests import mutations, told
from support.hostile_requests import Entry, entries, faults, names, sent
from support.serving import RunningServer
from support.vitals import Patient

pytestmark = pytest.mark.hostile

ALL = [
    pytest.param(entry, id=f"{name}: {entry.name}") for name in names() for entry in entries(name)
]
MUTATIONS, SEED = 4_000, 14


@pytest.mark.parametrize("entry", ALL)
def test_entry(server: RunningServer, patient: Patient, entry: Entry) -> None:
    wrong = list(faults(entry, sent(entry, server.address)))
    assert bool(wrong) == entry.fails, wrong or "take `fails` out: it is answered right"
    patient.check(entry.name)


def test_noise(server: RunningServer, patient: Patient) -> None:
    """Seeded changes of good requests get a complete HTTP answer, with no 5xx except 501 and
    505."""

    def harm(data: bytes) -> str:
        outcome = told(server.address, data)
        bad = [s for s in outcome.statuses if s >= 500 and s not in (501, 505)]
        fine = not bad and not outcome.rest and outcome.end in ("closed", "reset")
        return "" if fine else f"{data!r}: {outcome}"

    with ThreadPoolExecutor(4) as threads:
        harms = [text for text in threads.map(harm, mutations(SEED, MUTATIONS)) if text]
    assert harms == []
    patient.check(f"{MUTATIONS} changed requests")


def test_no_traceback(server: RunningServer, log: Path) -> None:
    """Runs last in this file: no request caused an error of the server."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line for line in lines if line["level"] not in ("info", "warning")] == []
