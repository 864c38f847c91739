"""`--cpu-report`: where the CPU-seconds of a run go, with those of the processes that tests start.

`--durations` counts what a test waits for; on two cores that several workers share it says little.
"""

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support import programs

TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
SHOWN = 100  # tests and files


class CpuReport:
    """The plugin: workers measure, the process with the terminal adds up."""

    def __init__(self) -> None:
        self._before = 0.0
        self._forks = Counter[int]()  # the most seconds that a forked program was seen with
        self.tests, self.files = Counter[str](), Counter[str]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        self._before = self._spent()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        item.user_properties.append(("cpu", self._spent() - self._before))
        return result

    def _spent(self) -> float:
        """Return the seconds of this process and of the programs that it had forked elsewhere."""
        for pid, ended in programs.FORKS.items():
            seconds = cpu_seconds(pid) if ended is None else ended
            self._forks[pid] = max(self._forks[pid], seconds)
        return cpu_seconds() + self._forks.total()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties if report.when == "teardown" else ():
            if name == "cpu":
                self._add(report.nodeid, float(str(seconds)))

    def _add(self, nodeid: str, seconds: float) -> None:
        self.tests[nodeid] += seconds
        self.files[nodeid.partition("::")[0]] += seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):  # with the workers, which are descendants
            # Also what the engine used of a server that was killed in the test that started it.
            self._add("(outside of tests)", cpu_seconds() - sum(self.tests.values()))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        for title, counted in (("files", self.files), ("tests", self.tests)):
            terminalreporter.section(f"CPU-seconds of {title}")
            for name, seconds in counted.most_common(SHOWN):
                write(f"{seconds:8.2f}  {name}")
        write(f"{sum(self.tests.values()):8.2f}  in all")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-report", action="store_true", help="show the CPU-seconds of each test")


def register(config: pytest.Config) -> None:
    if not config.getoption("--cpu-report"):
        return
    if sys.platform != "linux":
        raise pytest.UsageError("--cpu-report reads /proc, so it needs Linux")
    # A killed server's engine must stay a descendant of this process, or its time would be lost.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    config.pluginmanager.register(CpuReport())


def cpu_seconds(pid: int | None = None) -> float:
    """Return the seconds of a process, this one by default, and of its descendants, running or
    ended."""
    process = Path("/proc", str(pid or os.getpid()))
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        lists = [path.read_text() for path in process.glob("task/*/children")]
    except OSError:  # it has ended
        return 0.0
    own = sum(map(int, fields[11:15])) / TICKS  # with those that it has waited for
    return own + sum(cpu_seconds(int(child)) for one in lists for child in one.split())
