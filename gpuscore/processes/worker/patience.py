"""Types of both ways to an engine's process: its supervisor's, and a front's link."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from gpuscore.errors import EngineFailed
from gpuscore.processes.worker.frames import Send
from gpuscore.processes.worker.messages import Failure, Result
from gpuscore.types.limits import BackendLimits
from gpuscore.types.stats import EngineStats

TICK = 0.1  # seconds between two checks of a silent child


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds, except `max_failures`. A ready child sends a heartbeat every 0.25 s."""

    silent: float = 1.5  # of silence: the child counts as unhealthy
    stopped: float = 5.0  # of silence: the child is killed
    first_delay: float = 0.5  # before the first restart; doubled with each further failure
    max_delay: float = 30.0
    forgiven: float = 60.0  # of service, after which earlier failures do not count
    max_failures: int = 5  # in a row; then the child is not restarted
    close: float = 1.0  # for the child to end by itself

    def delay(self, failures: int) -> float:
        """Return the seconds before a restart after so many failures in a row."""
        # The exponent is bounded, because beside other replicas failures may be countless.
        return min(self.first_delay * 2.0 ** min(failures - 1, 32), self.max_delay)


class ChildListener(Protocol):
    """The receiver of the child's events; the supervisor's thread makes all calls."""

    def on_ready(self, send: Send) -> None:
        """Note that a child is ready; `send` sends messages to it without blocking."""

    def on_answer(self, answer: Result | Failure) -> None:
        """Take an answer; raise ProtocolError if no request was sent with its id."""

    def on_silent(self) -> None:
        """Note that a ready child counts as unhealthy; called again until it is heard."""

    def on_lost(self) -> None:
        """Note that the child is lost, if there was one: it will send no further answers."""


@dataclass(frozen=True, slots=True)
class Report:
    """An engine's account of its work.

    Args:
        number: of heartbeats so far.
        tokens_left: tokens that it had still to compute then.
        alone: nobody else sends it requests.
    """

    number: int
    tokens_left: int
    alone: bool


def run_to_end(
    run: Callable[[], None], ended: "Future[None]", waiting: Sequence["Future[Any]"]
) -> None:
    """Run a link's thread: `ended` gets its outcome, and those who still wait an error."""
    error: Exception = EngineFailed("the engine was closed")
    try:
        run()
        ended.set_result(None)
    except Exception as failure:  # noqa: BLE001  (raised by the futures' `result`)
        error = failure
        ended.set_exception(failure)
    finally:
        for one in waiting:
            if not one.done():
                one.set_exception(error)


class EngineLink(Protocol):
    """The way to an engine's process: a `Supervisor`, or the link of a front."""

    planned: "Future[str]"
    started: "Future[BackendLimits]"
    ended: "Future[None]"
    loaded: tuple[int, int]  # bytes of weights that the child has read, and of all

    @property
    def healthy(self) -> bool: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def reported(self) -> Report: ...

    @property
    def rate(self) -> float: ...

    @property
    def retry_after(self) -> int: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


def passed(since: float) -> float:
    """Return the seconds since then, capped: a pause of this process is not the child's silence."""
    return min(monotonic() - since, 2 * TICK)


def same_model(one: BackendLimits, other: BackendLimits) -> bool:
    """Return True if prompts checked against one model fit the other; memory may differ."""
    kept = (one.vocab_rows, one.classes, one.max_model_len)
    return kept == (other.vocab_rows, other.classes, other.max_model_len)
