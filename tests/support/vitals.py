"""The state that an attack must leave unchanged: the canary's answer, memory, descriptors,
threads."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from support.serving import children

MIB = 2**20
GROWTH = 20 * MIB  # resident memory that a process may gain by one attack
SETTLE = 5.0  # seconds after an attack within which everything recovers


@dataclass(frozen=True)
class Vitals:
    """The resources of one process.

    Args:
        rss: bytes of resident memory.
        descriptors: open files.
        threads: number of threads.
    """

    rss: int
    descriptors: int
    threads: int


def vitals(pid: int) -> Vitals:
    process = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    rss, threads = int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"])
    return Vitals(rss, len(os.listdir(process / "fd")), threads)


class Patient:
    """A server under attack, compared after each attack with its state at first.

    Args:
        pid: the server's process id; its children are checked, too.
        canary: sends a fixed request and returns the server's answer.
    """

    def __init__(self, pid: int, canary: Callable[[], str]) -> None:
        self._pid, self._canary = pid, canary
        for _ in range(3):  # memory of the first requests stays allocated
            self._answer = canary()
        self._before = self._all()

    def check(
        self,
        attack: str = "the attack",
        canary: Callable[[], str] | None = None,
        growth: int = GROWTH,
    ) -> None:
        """Assert that the server is as it was before, within `SETTLE` seconds.

        A replaced child is compared with its predecessor.

        Args:
            attack: its name, for the message.
            canary: the same request on another connection.
            growth: bytes of resident memory that a process may gain.
        """
        deadline = monotonic() + SETTLE
        while (harm := self._harm(growth)) and monotonic() < deadline:
            sleep(0.1)
        assert not harm, f"after {attack}: {harm}"
        answer = (canary or self._canary)()
        assert answer == self._answer, f"after {attack} the canary got {answer}"

    def grew(self) -> int:
        """Return the bytes of resident memory that the server's own process has gained since the
        start."""
        return vitals(self._pid).rss - self._before[0].rss

    def _all(self) -> list[Vitals]:
        return [vitals(pid) for pid in (self._pid, *children(self._pid))]

    def _harm(self, growth: int) -> str:
        """Return what has changed for the worse; empty if nothing has."""
        now = self._all()
        if len(now) != len(self._before):
            return f"{len(now) - 1} children, before {len(self._before) - 1}"
        for child, (before, after) in enumerate(zip(self._before, now, strict=True)):
            who, grown = f"child {child}" if child else "the server", after.rss - before.rss
            if grown > growth:
                return f"{who} has {grown // MIB} MiB more memory, {growth // MIB} are allowed"
            if after.descriptors > before.descriptors or after.threads > before.threads:
                return f"{who} has descriptors and threads: {after}, before {before}"
        return ""
