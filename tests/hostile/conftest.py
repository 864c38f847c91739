"""A server with short timeouts that is attacked, and checks of its health after every attack.

Tests that take minutes carry `pytest.mark.hostile`; those that measure latency also carry
`pytest.mark.alone`. `make test` runs neither, `make test-hostile` runs everything in this folder.
"""

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.connections import canary, connected, score
from support.serving import RunningServer, serving
from support.vitals import Patient

DESCRIPTORS = 8192  # thousands of connections: a limit of the tests that the servers inherit
TIMES = ("--client-timeout", "1", "--keep-alive-timeout", "3")
NAMES = ("--allowed-hosts", "*")  # of changed requests
WARM = 8  # concurrent requests that make the server start all of its threads


@pytest.fixture(scope="session", autouse=True)
def _many_descriptors() -> Iterator[None]:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file to which `server` writes its standard error, one JSON object per line."""
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="session")
def server(log: Path) -> Iterator[RunningServer]:
    """A server of the demo model without a key, with short timeouts."""
    flags = ("--threads", "1", "--no-log-requests", *TIMES, *NAMES)
    with serving("demo", *flags, log=log, fork=False) as running:
        yield running


@pytest.fixture(scope="session")
def patient_of() -> Iterator[Callable[..., Patient]]:
    """patient_of(server, key=None) -> Patient, whose `check(attack)` follows each attack. Call it
    before the first attack."""
    clients = []

    def make(server: RunningServer, key: str | None = None) -> Patient:
        client = connected(server, key)
        clients.append(client)
        with ThreadPoolExecutor(WARM) as threads:  # start the threads for text and metrics
            for _ in range(WARM):
                threads.submit(score, client, query="a", items=["b"], label_token_ids=[3])
                threads.submit(client.get, "/metrics")
        return Patient(server.process.pid, lambda: canary(client))

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def patient(server: RunningServer, patient_of: Callable[..., Patient]) -> Patient:
    """The `Patient` of `server`, as it is before the test."""
    return patient_of(server)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests noted with record_property("said", text)."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "said":
                terminalreporter.write_line(str(text))
