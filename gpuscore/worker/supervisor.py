"""Keeps one engine process running: starts it, watches it, ends it, starts it again."""

import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol

from gpuscore.engine.admission import MAX_RETRY_AFTER
from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout
from gpuscore.limits import BackendLimits
from gpuscore.stats import NO_COUNTERS, NO_STATS, EngineStats
from gpuscore.worker.frames import ProtocolError, Send
from gpuscore.worker.messages import (
    Close,
    Failure,
    FromChild,
    Heartbeat,
    Planned,
    Ready,
    Refused,
    Result,
    Start,
    decode_from_child,
    encode,
)
from gpuscore.worker.process import EngineProcess

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at a silent child


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds, except `max_failures`. A child that is ready beats every 0.25 s."""

    silent: float = 1.5  # without a sign of life: not healthy
    stopped: float = 5.0  # without a sign of life: killed
    first_delay: float = 0.5  # before the first restart; doubles with each further one ...
    max_delay: float = 30.0
    forgiven: float = 60.0  # ... until a child has served this long
    max_failures: int = 5  # in a row, then it is given up
    close: float = 1.0  # for the batch in flight at the end


class ChildListener(Protocol):
    """Who is told about the child; all calls come from the supervisor's thread."""

    def on_ready(self, send: Send) -> None:
        """A child is ready; `send` takes messages to it, without waiting."""

    def on_answer(self, answer: Result | Failure) -> None:
        """Raises ProtocolError for what is no answer to anything."""

    def on_lost(self) -> None:
        """The child that was ready is no more, and none of its answers will come."""


class Supervisor:
    """One thread, the only one that touches the child's process and reads what it sends.

    Args:
        command: starts the child; what `EngineProcess` adds to it is not in it.
        start: what the child is to load; its engine_timeout is for how long a batch may run.
        owner: is told what happens.
    """

    def __init__(
        self, command: Sequence[str], start: Start, owner: ChildListener, patience: Patience
    ) -> None:
        self.planned: Future[str] = Future()
        self.started: Future[BackendLimits] = Future()
        self.ended: Future[None] = Future()  # with EngineFailed once it is given up
        self.pid: int | None = None
        self.restarts = 0  # counter
        self._command, self._start, self._owner = command, start, owner
        self._patience = patience
        self._closing = threading.Event()
        self._stats = NO_STATS  # as of the last heartbeat; counters of all children together
        self._past = NO_COUNTERS  # of the children before
        self._heard = monotonic()  # when a child that was ready last gave a sign of life
        self._silence = 0.0  # seconds without a sign of the child that runs
        self._loading = 0.0  # seconds that it took to be ready, so far
        self._spawned = 0.0  # when it was started
        self._ready_at: float | None = None
        self._load_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the child and the thread; blocks for `Patience.close` and a moment."""
        self._closing.set()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether the child is ready, and was heard of just now."""
        heard = self._ready_at is not None and self._silence <= self._patience.silent
        return heard and self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """What the child last said. Counters go on from those of the children before it, as far as
        heartbeats have told: what a child did in its last quarter of a second is not in them."""
        age = max(0.0, monotonic() - self._heard)
        return replace(self._stats, restarts=self.restarts, heartbeat_age=age)

    @property
    def rate(self) -> float:
        """Tokens per second of well filled batches, as the child last said; 0 while unknown."""
        return self._stats.capacity

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a child may be ready."""
        seconds = max(0.0, self._spawned + self._load_seconds - monotonic())
        return max(1, min(MAX_RETRY_AFTER, math.ceil(seconds)))

    def _run(self) -> None:
        error: Exception = EngineFailed("the engine was closed")
        try:
            self._keep_running()
            self.ended.set_result(None)
        except Exception as failure:  # noqa: BLE001  (raised again by whoever waits)
            error = failure
            self.ended.set_exception(failure)
        finally:
            for waiting in (self.planned, self.started):
                if not waiting.done():
                    waiting.set_exception(error)

    def _keep_running(self) -> None:
        """Raises ConfigError or EngineFailed when there is no use in a further start."""
        failures = 0
        while True:
            reason, served = self._run_once()
            if self._closing.is_set():
                return
            failures = 1 if served >= self._patience.forgiven else failures + 1
            if not self.started.done() and self._loading > self._start.engine.load_timeout:
                raise LoadTimeout(reason)
            if not self.started.done():
                raise EngineFailed(f"the engine's process was lost at start: {reason}")
            if failures >= self._patience.max_failures:
                raise EngineFailed(f"the engine failed {failures} times in a row, last: {reason}")
            delay = min(self._patience.first_delay * 2 ** (failures - 1), self._patience.max_delay)
            logger.error("the engine's process was lost: %s; restart in %.1f s", reason, delay)
            self._spawned = monotonic() + delay
            if self._closing.wait(delay):
                return
            self.restarts += 1

    def _run_once(self) -> tuple[str, float]:
        """One life of a child: why it was lost, and for how many seconds it served."""
        try:
            process = EngineProcess(self._command)
        except OSError as error:
            return f"it cannot be started ({error})", 0.0
        self.pid, self._spawned = process.pid, monotonic()
        self._silence = self._loading = 0.0
        process.writer.put(lambda: encode(self._start))
        patience = 0.0
        try:
            reason = self._watch(process)
            if self._closing.is_set() and self._ready_at is not None:
                patience = self._patience.close
        except EOFError:
            reason, patience = "", 1.0  # it has closed its end, so it is about to be gone
        except ProtocolError as error:
            reason = f"it sent {error}"
        finally:
            served = 0.0 if self._ready_at is None else monotonic() - self._ready_at
            self._ready_at = None
            self._past = self._stats.counters
            self._stats = replace(NO_STATS, counters=self._past)
            self._owner.on_lost()
            ended = process.end(patience)
        return reason or ended, served

    def _watch(self, process: EngineProcess) -> str:
        """Handle messages until there is a reason to end the process."""
        before = monotonic()
        while not self._closing.is_set():
            frames = process.reader.read() if process.reader.wait(TICK) else []
            for frame in frames:
                if reason := self._handle(process, decode_from_child(frame)):
                    return reason
            if frames or process.reader.in_bulk:
                # Fewer bytes that complete nothing may be heartbeats inside a frame without end.
                self._silence, process.reader.in_bulk = 0.0, False
                if self._ready_at is not None:
                    self._heard = monotonic()
            else:
                self._silence += _passed(before)
            if self._ready_at is None:
                self._loading += _passed(before)
            before = monotonic()
            if reason := self._overdue():
                return reason
        process.writer.put(lambda: encode(Close()))
        return "closed"

    def _overdue(self) -> str:
        """Why the process is to be ended because of what it did not say, if it is."""
        limit = self._start.engine.load_timeout
        if self._ready_at is not None:
            late = self._silence > self._patience.stopped
            return f"no sign of life for {self._silence:.1f} s" if late else ""
        if self._loading <= limit:
            return ""
        doing = "load and warm the model" if self.planned.done() else "import its framework"
        return (
            f"the engine did not {doing} within --load-timeout {limit:g} s: something hangs, or "
            "the limit is too short for this machine"
        )

    def _handle(self, process: EngineProcess, message: FromChild) -> str:
        """Why the process is to be ended, if it is."""
        match message:
            case Heartbeat():
                counters = self._past + message.stats.counters
                self._stats = replace(message.stats, counters=counters)
                if message.stalled > self._start.engine.engine_timeout:
                    return f"the engine has not got on for {message.stalled:.1f} s"
            case Result() | Failure():
                self._owner.on_answer(message)
            case Planned():
                if not self.planned.done():
                    self.planned.set_result(message.about)
            case Ready():
                return self._on_ready(process, message.limits)
            case Refused():
                if not self.started.done():
                    raise ConfigError(message.message)
                return message.message
        return ""

    def _on_ready(self, process: EngineProcess, limits: BackendLimits) -> str:
        if self._ready_at is not None:
            raise ProtocolError("Ready twice")
        if self.started.done() and not _same_model(self.started.result(), limits):
            return "the model has become another one since the server was started"
        self._ready_at = monotonic()
        self._load_seconds = self._ready_at - self._spawned
        self._owner.on_ready(process.writer.put)
        if not self.started.done():
            self.started.set_result(limits)
        return ""


def _passed(since: float) -> float:
    """Seconds, capped: what this process itself has slept through says nothing of the child."""
    return min(monotonic() - since, 2 * TICK)


def _same_model(one: BackendLimits, other: BackendLimits) -> bool:
    """Whether prompts that were checked against the one fit the other; memory may differ."""
    kept = (one.vocab_rows, one.classes, one.max_model_len)
    return kept == (other.vocab_rows, other.classes, other.max_model_len)
