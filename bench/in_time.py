"""The time that a stage of bench/gpu_day.py has left, and a record of its tests' outcomes.

The environment tells a stage when it will be ended. As a plugin of pytest (`-p in_time`), this
module writes each test's outcome into a file of JSON lines as soon as it is known, so that a killed
run loses only the test that is running, and ends the run before the time is up.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDS = "GPU_DAY_STAGE_ENDS"  # seconds since the epoch
OUTCOMES = "GPU_DAY_OUTCOMES"  # the plugin's file
RESERVE = 10.0  # seconds for a section's last findings, and for pytest's summary


def seconds_left() -> float:
    """Return the seconds until this stage should have ended; infinity outside of a day."""
    return float(os.environ.get(ENDS, "inf")) - time.time() - RESERVE


class Outcomes:
    """Writes each test's outcome, and stops the session when the time is up.

    Under pytest-xdist the process that hands out tests gets the reports of all.
    """

    def __init__(self, session: Any, path: Path) -> None:
        self.session, self.path = session, path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            bad = "error" if report.outcome == "failed" and report.when != "call" else None
            line = {"test": report.nodeid, "outcome": bad or report.outcome}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if seconds_left() <= 0:
            self.session.shouldstop = "the stage's time is up"


def pytest_sessionstart(session: Any) -> None:
    if OUTCOMES in os.environ and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Outcomes(session, Path(os.environ[OUTCOMES])))


def outcomes(path: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and so on, and the names of the failed ones."""
    reports = [json.loads(line) for line in _whole_lines(path)]
    kinds = [report["outcome"] for report in reports]
    bad = [report["test"] for report in reports if report["outcome"] in ("failed", "error")]
    return {"tests": len(reports), **{kind: kinds.count(kind) for kind in sorted(set(kinds))}} | {
        "not passed": bad
    }


def _whole_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file; its last line may have been cut off."""
    yield from (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
