"""The progress bar while engines read their weights, on standard error if that is a terminal."""

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from tqdm import tqdm

from gpuscore.types.limits import BackendLimits

POLL = 0.1  # seconds
WITHOUT_LENGTH = "{desc} [{elapsed}]"


class LoadingEngine(Protocol):
    """The part of an `EngineClient` that is watched."""

    @property
    def started(self) -> Future[BackendLimits]: ...
    @property
    def loaded(self) -> tuple[int, int]: ...


class LoadingBar:
    """A bar over the weights of all engines, from now until they are ready or `close`."""

    def __init__(self, engines: Sequence[LoadingEngine]) -> None:
        self._engines, self._closing = engines, threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading-bar", daemon=True)
        if sys.stderr.isatty():
            self._thread.start()

    def close(self) -> None:
        """Remove the bar."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with tqdm(unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=POLL) as bar:
            while not self._closing.wait(POLL):
                if all(engine.started.done() for engine in self._engines):
                    return
                done, total = map(sum, zip(*(one.loaded for one in self._engines), strict=True))
                _show(bar, done, total)


def _show(bar: "tqdm[None]", done: int, total: int) -> None:
    if not total:
        return
    bar.desc, bar.n, bar.total = "reading weights: ", done, total
    if done >= total:  # nobody knows how long the rest takes
        bar.desc, bar.bar_format = "measuring memory and warming up", WITHOUT_LENGTH
    bar.refresh()
