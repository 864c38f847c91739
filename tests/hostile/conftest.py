"""A server with short times that is attacked, and what it must be like after every attack.

Tests that take minutes carry `pytest.mark.hostile`, those that measure how late answers are also
`pytest.mark.alone`. `make test` runs neither, `make test-hostile` everything in this folder.
"""

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.models import make_model
from support.serving import RunningServer, serving
from support.vitals import Patient
from support.wire import canary, connected, score

DESCRIPTORS = 8192  # of the tests and, as they inherit it, of the servers: thousands of connections
TIMES = ("--header-timeout", "1", "--body-timeout", "1", "--send-timeout", "1")
LIMITS = ("--max-body-bytes", "1048576")
WARM = 8  # requests at a time, until threads that are made when needed are there


@pytest.fixture(scope="session", autouse=True)
def _many_descriptors() -> Iterator[None]:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model with a tokenizer."""
    directory = tmp_path_factory.mktemp("attacked")
    make_model(directory, "llama")
    return directory


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `server` writes to its standard error, one JSON object per line."""
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="session")
def server(model: Path, log: Path) -> Iterator[RunningServer]:
    """No key, short times, a narrow limit of bodies; its log is the fixture `log`."""
    with serving(model, "--threads", "1", *TIMES, *LIMITS, log=log) as running:
        yield running


@pytest.fixture(scope="session")
def patient_of() -> Iterator[Callable[..., Patient]]:
    """A factory: patient_of(server, key=None) -> Patient, whose `check(attack)` comes after each
    attack. Call it before the first one."""
    clients = []

    def make(server: RunningServer, key: str | None = None) -> Patient:
        client = connected(server, key)
        clients.append(client)
        with ThreadPoolExecutor(WARM) as threads:  # text, metrics: in threads of the server
            for _ in range(WARM):
                threads.submit(score, client, query="a", items=["b"], label_token_ids=[3])
                threads.submit(client.get, "/metrics")
        return Patient(server.process.pid, lambda: canary(client))

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def patient(server: RunningServer, patient_of: Callable[..., Patient]) -> Patient:
    """Of `server`."""
    return patient_of(server)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have noted with record_property("said", text): figures that a run is to show."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "said":
                terminalreporter.write_line(str(text))
