"""The supervisor of an engine's process, which starts, watches and restarts it."""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol

from msgspec import structs

from gpuscore.engine.admission import MAX_RETRY_AFTER
from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, Send
from gpuscore.processes.worker.process import EngineProcess, Patience
from gpuscore.processes.worker.wire import (
    Close,
    Failure,
    FromChild,
    Heartbeat,
    Loading,
    Planned,
    ProtocolError,
    Ready,
    Refused,
    Result,
    Start,
    decoder,
)
from gpuscore.types.batch import BackendLimits
from gpuscore.types.stats import NO_COUNTERS, NO_STATS, EngineStats

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two checks of a silent child


@dataclass(frozen=True, slots=True)
class Report:
    """An engine's account of its work.

    Args:
        number: of heartbeats so far.
        tokens_left: tokens that it had still to compute then.
    """

    number: int
    tokens_left: int


class ChildListener(Protocol):
    """The receiver of the child's events; the link's thread makes all calls."""

    def on_ready(self, send: Send) -> None:
        """Note that a child is ready; `send` sends messages to it without blocking."""

    def on_answer(self, answer: Result | Failure) -> None:
        """Take an answer; raise ProtocolError if no request was sent with its id."""

    def on_silent(self) -> None:
        """Note that a ready child counts as unhealthy; called again until it is heard."""

    def on_lost(self) -> None:
        """Note that the child is lost, if there was one: it will send no further answers."""


class Supervisor:
    """The link to an engine's process, and the thread that starts, watches and restarts it.

    Args:
        command: starts the child, without the arguments that `EngineProcess` adds.
        start: the model to load; a batch may make no progress for its engine_timeout.
        owner: receives the child's events.
        patience: times and counts after which a child is killed or not restarted.
        environment: variables that the child gets besides this process's.
        may_give_up: asked before a child that failed too often is not restarted any more.
        after: the first child starts once this is done without an error.
        like: the `dtype` of the model's first replica, which this replica waits for and takes over.

    Attributes:
        planned: the child's description of the model; raises as `started`.
        started: the limits of the first child, once the model is loaded and warm. It raises
            ConfigError if the model cannot be served, LoadTimeout if the child was not ready within
            the `load_timeout`, EngineFailed if it was lost or the link closed before.
        ended: done after `close`; raises EngineFailed if the child fails too often to be restarted.
        loaded: bytes of weights that the child has read, and of all; 0 where that is not known.
        dtype: the number format that the first child has chosen; never done if it has not planned.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        owner: ChildListener,
        patience: Patience,
        environment: Mapping[str, str],
        may_give_up: Callable[[], bool],
        after: "Future[BackendLimits] | None" = None,
        like: "Future[str] | None" = None,
    ) -> None:
        self.planned: Future[str] = Future()
        self.started: Future[BackendLimits] = Future()
        self.ended: Future[None] = Future()
        self.dtype: Future[str] = Future()
        self.loaded = (0, 0)
        self.failures = 0  # in a row
        self.restarts = 0  # so far
        self.pid: int | None = None
        self.patience = patience
        self._owner = owner
        self._command, self._start = command, start
        self._after, self._like = after, like
        self._environment, self._may_give_up = environment, may_give_up
        self._closing = threading.Event()
        self._finishing = threading.Lock()
        self._heartbeats = 0  # so far, of all children
        self._stats = NO_STATS  # of the last heartbeat; the counters include `_past`
        self._past = NO_COUNTERS  # of the earlier children
        self._heard = monotonic()  # time of the last data from a ready child
        self._silence = 0.0  # seconds since the last data from the present child
        self._ready_at: float | None = None  # None while no child is ready
        self._loading = 0.0  # seconds that the present child has been loading
        self._spawned = 0.0  # time of the child's start, or of the next one's
        self._load_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, and a child of this process; block until both have ended."""
        self._closing.set()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """True if the child is ready and has been silent for at most `Patience.silent` seconds."""
        heard = self._ready_at is not None and self._silence <= self.patience.silent
        return heard and self._thread.is_alive()

    @property
    def hopeful(self) -> bool:
        """True unless children failed too often in a row; one that serves long is forgiven."""
        ready_at = self._ready_at
        forgiven = ready_at is not None and monotonic() - ready_at >= self.patience.forgiven
        return forgiven or self.failures < self.patience.max_failures

    @property
    def stats(self) -> EngineStats:
        """The stats of the last heartbeat, with counters that add up all children.

        They lack the work of a lost child since its last heartbeat.
        """
        age = max(0.0, monotonic() - self._heard)
        return replace(self._stats, heartbeat_age=age, restarts=self.restarts)

    @property
    def reported(self) -> Report:
        """The last heartbeat's account of the child's work."""
        return Report(self._heartbeats, self._stats.tokens_left)

    @property
    def rate(self) -> float:
        """Tokens per second in well filled batches, by the last heartbeat; 0 while unknown."""
        return self._stats.capacity

    @property
    def retry_after(self) -> int:
        """Whole seconds until a child may be ready."""
        seconds = max(0.0, self._spawned + self._load_seconds - monotonic())
        return max(1, min(MAX_RETRY_AFTER, math.ceil(seconds)))

    def finish(self, error: Exception, end: Exception | None) -> None:
        """Set the futures that are not set yet: `ended` with `end`, the others with `error`."""
        with self._finishing:
            if not self.ended.done() and end is None:
                self.ended.set_result(None)
            elif not self.ended.done():
                self.ended.set_exception(end)
            if not self.planned.done():
                self.planned.set_exception(error)
            if not self.started.done():
                self.started.set_exception(error)

    def _run(self) -> None:
        try:
            self._keep_running()
            self.finish(EngineFailed("the engine was closed"), None)
        except Exception as error:  # noqa: BLE001  (raised by the futures' `result`)
            self.finish(error, error)

    def _keep_running(self) -> None:
        """Run one child after the other until `close`.

        Raises:
            ConfigError, EngineFailed: another start would not help.
        """
        while not self._may_start():
            if self._closing.wait(TICK):
                return
        if self._like is not None:
            self._start = _in_format(self._start, self._like.result())
        while True:
            reason, served = self._run_once()
            if self._closing.is_set():
                return
            self.failures = 1 if served >= self.patience.forgiven else self.failures + 1
            if not self.started.done() and self._loading > self._start.engine.load_timeout:
                raise LoadTimeout(reason)
            if not self.started.done():
                raise EngineFailed(f"the engine's process was lost at start: {reason}")
            times = self.failures
            if times >= self.patience.max_failures and self._may_give_up():
                raise EngineFailed(f"the engine failed {times} times in a row, last: {reason}")
            delay = self.patience.delay(self.failures)
            logger.error("the engine's process was lost: %s; restart in %.1f s", reason, delay)
            self._spawned = monotonic() + delay
            if self._closing.wait(delay):
                return
            self.restarts += 1

    def _may_start(self) -> bool:
        before = self._after
        loaded = before is None or (before.done() and before.exception() is None)
        return loaded and (self._like is None or self._like.done())

    def _run_once(self) -> tuple[str, float]:
        """Run one child; return why it ended, and for how many seconds it served."""
        try:
            process = EngineProcess(self._command, self._environment)
        except OSError as error:
            return f"it cannot be started ({error})", 0.0
        self.pid, self._spawned = process.pid, monotonic()
        self._loading = 0.0
        process.writer.send(self._start)
        patience = 0.0
        try:
            reason = self._watch(process.reader, process.writer)
            if self._closing.is_set() and not reason:
                process.writer.send(Close())
                patience = 0.0 if self._ready_at is None else self.patience.close
        except EOFError:
            reason, patience = "", 1.0  # it has closed its end, so it will exit soon
        except ProtocolError as error:
            reason = f"it sent {error}"
        finally:
            served = 0.0 if self._ready_at is None else monotonic() - self._ready_at
            self._past = self._stats.counters
            self._lost()
            ended = process.end(patience)
        return reason or ended, served

    def _watch(self, reader: FrameReader, writer: FrameWriter) -> str:
        """Handle messages until `close` or a reason to end the child; return the reason."""
        before = monotonic()
        decode: Callable[[bytes], FromChild] = decoder(FromChild)
        while not self._closing.is_set():
            frames = reader.read() if reader.wait(TICK) else []
            for frame in frames:
                if reason := self._handle(decode(frame), writer):
                    return reason
            since = passed(before)
            before = monotonic()
            if frames or reader.in_bulk:
                # A few bytes that complete no frame are no sign of life: they may be heartbeats
                # that the reader takes for the inside of a damaged frame.
                self._silence, reader.in_bulk = 0.0, False
                if self._ready_at is not None:
                    self._heard = before
            else:
                self._silence += since
            if self._ready_at is not None and self._silence > self.patience.silent:
                self._owner.on_silent()
            if reason := self._overdue(since):
                return reason
        return ""

    def _overdue(self, seconds: float) -> str:
        """Return a reason to end a silent or slowly loading process; empty if there is none."""
        if self._ready_at is not None:
            late = self._silence > self.patience.stopped
            return f"no sign of life for {self._silence:.1f} s" if late else ""
        self._loading += seconds
        limit = self._start.engine.load_timeout
        if self._loading <= limit:
            return ""
        doing = "load and warm the model" if self.planned.done() else "import its framework"
        return (
            f"the engine did not {doing} within --load-timeout {limit:g} s: something hangs, or "
            "the limit is too short for this machine"
        )

    def _handle(self, message: FromChild, writer: FrameWriter) -> str:
        """Handle a message; return a reason to end the child, or an empty string."""
        match message:
            case Planned():
                if not self.planned.done():
                    self._start = _in_format(self._start, message.dtype)
                    self.dtype.set_result(message.dtype)
                    self.planned.set_result(message.about)
            case Loading():
                self.loaded = (message.done, message.total)
            case Refused():
                if not self.started.done():
                    raise ConfigError(message.message)
                return message.message
            case Ready() if self._ready_at is None:
                self._load_seconds = monotonic() - self._spawned
                return self._on_ready(message.limits, writer.put)
            case Heartbeat():
                counters = self._past + message.stats.counters
                self._stats = replace(message.stats, counters=counters)
                self._heartbeats += 1
                if message.stalled > self._start.engine.engine_timeout:
                    return f"the engine has made no progress for {message.stalled:.1f} s"
            case Result() | Failure():
                self._owner.on_answer(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} at the wrong time")
        return ""

    def _on_ready(self, limits: BackendLimits, send: Send) -> str:
        first = self.started
        if first.done() and (first.exception() or not same_model(first.result(), limits)):
            return "the restarted engine has loaded another model than the first one"
        self._ready_at = monotonic()
        self._owner.on_ready(send)  # before anybody who waits for `started` goes on
        with self._finishing:
            if not self.started.done():
                self.started.set_result(limits)
        return ""

    def _lost(self) -> None:
        """Note that there is no child."""
        self._ready_at, self._silence = None, 0.0
        self._stats = replace(NO_STATS, counters=self._past)
        self._owner.on_lost()


def _in_format(start: Start, dtype: str) -> Start:
    return structs.replace(start, model=replace(start.model, dtype=dtype))


def passed(since: float) -> float:
    """Return the seconds since a time, at most 2 TICK: a pause of this process is no silence."""
    return min(monotonic() - since, 2 * TICK)


def same_model(limits: BackendLimits, other: BackendLimits) -> bool:
    """Return True if prompts checked against one model fit the other; memory may differ."""
    kept = (limits.vocab_rows, limits.classes, limits.max_model_len)
    return kept == (other.vocab_rows, other.classes, other.max_model_len)
