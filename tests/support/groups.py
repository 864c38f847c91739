"""Groups of tests that run in one worker of pytest-xdist: users of a shared server, or a file's.

Workers collect and know a test's fixtures; the process that hands out the tests knows names only.
So each worker writes the groups into a file, and the scheduler reads it. The marks of xdist's own
`--dist loadgroup` travel in the tests' names. With pytest 9.2 they get lost in silence: every test
runs in any worker, and each worker sets everything up (pytest-xdist issue 1386).
"""

import json
import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# What tests share and is long in starting. All tests that use one run in one worker, the first of
# these that a test uses counts. They begin first, the last one first.
SERVERS = ("limited_server", "watched", "deterministic", "demo", "server")
# Files that wait or compute for long, which begin before all others.
LONG = (
    *("tests/replicas/test_replicas.py", "tests/worker/test_client.py"),
    *("tests/test_first_hour.py", "tests/kernels/test_interpreted.py"),
)


def group_of(item: pytest.Item) -> str:
    """Return the name of the group of tests that run in one worker."""
    used = getattr(item, "fixturenames", ())
    if "shared_backends" in used:
        return "shared_backends"
    if item.nodeid.startswith("tests/client/") and "url" in used:
        return "tests/client"
    if item.nodeid.startswith("tests/server/"):
        for server in SERVERS:
            if server in used:
                return server
    return item.nodeid.partition("::")[0]


def sort_and_write(items: list[pytest.Item], path: Path) -> None:
    """Put groups that take long first, and write the groups for the scheduler."""
    rank = {name: number for number, name in enumerate(("shared_backends", *SERVERS, *LONG))}
    items.sort(key=lambda item: -rank.get(group_of(item), -1))
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({item.nodeid: group_of(item) for item in items}))
    written.replace(path)  # at once: all workers write the same, while one may already be read


class GroupScheduling(LoadScopeScheduling):
    """Gives the tests of a group to one worker, in the order of collection."""

    def __init__(self, config: pytest.Config, log: object, path: Path) -> None:
        super().__init__(config, log)
        self._path = path
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._groups:  # first asked for when all workers have collected
            self._groups = json.loads(self._path.read_text())
        return self._groups[nodeid]
