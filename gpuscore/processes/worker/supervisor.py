"""The supervisor of the engine's process: starts it, watches it, ends it and restarts it."""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic

from gpuscore.engine.admission import MAX_RETRY_AFTER
from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout
from gpuscore.processes.worker.frames import ProtocolError
from gpuscore.processes.worker.messages import (
    Close,
    Failure,
    FromChild,
    Heartbeat,
    Loading,
    Planned,
    Ready,
    Refused,
    Result,
    Start,
    decode_from_child,
    encode,
)
from gpuscore.processes.worker.patience import (
    TICK,
    ChildListener,
    Patience,
    Report,
    passed,
    run_to_end,
    same_model,
)
from gpuscore.processes.worker.process import EngineListener, EngineProcess
from gpuscore.types.limits import BackendLimits
from gpuscore.types.stats import NO_COUNTERS, NO_STATS, EngineStats

logger = logging.getLogger(__name__)


class Supervisor:
    """The thread that starts and ends the child's process and reads its messages.

    Args:
        command: starts the child, without the arguments that `EngineProcess` adds.
        start: the model to load; its engine_timeout is the longest time that a batch may run.
        owner: receives the child's events.
        patience: times and counts after which a child is killed or not restarted.
        environment: variables that the child gets besides this process's.
        may_give_up: asked before a child that failed too often is not restarted any more.
        listener: the fronts' way to each child.
        after: the first child starts once this is done without an error.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        owner: ChildListener,
        patience: Patience,
        environment: Mapping[str, str],
        may_give_up: Callable[[], bool],
        listener: EngineListener | None = None,
        after: "Future[BackendLimits] | None" = None,
    ) -> None:
        self.planned: Future[str] = Future()
        self.started: Future[BackendLimits] = Future()
        self.ended: Future[None] = Future()  # fails with EngineFailed after the last restart
        self.pid: int | None = None
        self.restarts = 0  # so far
        self.loaded = (0, 0)
        self._command, self._start, self._owner = command, start, owner
        self._patience, self._listener, self._after = patience, listener, after
        self._environment, self._may_give_up = environment, may_give_up
        self._failures = 0  # in a row
        self._closing = threading.Event()
        self._heartbeats = 0  # so far, of all children
        self._stats = NO_STATS  # of the last heartbeat; the counters add up all children
        self._past = NO_COUNTERS  # of the earlier children
        self._heard = monotonic()  # time of the last data from a ready child
        self._silence = 0.0  # seconds since the last data from the present child
        self._loading = 0.0  # seconds that the present child has been loading
        self._spawned = 0.0  # time of the child's start, or of the next one's
        self._ready_at: float | None = None
        self._load_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the child and the thread; block until both have ended."""
        self._closing.set()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """True if the child is ready and has been silent for at most `Patience.silent` seconds."""
        heard = self._ready_at is not None and self._silence <= self._patience.silent
        return heard and self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """The stats of the last heartbeat, with counters that add up all children.

        They lack the work of a lost child since its last heartbeat.
        """
        age = max(0.0, monotonic() - self._heard)
        return replace(self._stats, restarts=self.restarts, heartbeat_age=age)

    @property
    def reported(self) -> Report:
        """The last heartbeat's account of the child's work."""
        return Report(self._heartbeats, self._stats.tokens_left, alone=True)

    @property
    def rate(self) -> float:
        """Tokens per second in well filled batches, by the last heartbeat; 0 while unknown."""
        return self._stats.capacity

    @property
    def failures(self) -> int:
        """Failures in a row; 0 once a child has served for `Patience.forgiven` seconds."""
        ready_at = self._ready_at
        served = 0.0 if ready_at is None else monotonic() - ready_at
        return 0 if ready_at is not None and served >= self._patience.forgiven else self._failures

    @property
    def retry_after(self) -> int:
        """Whole seconds until a child may be ready."""
        seconds = max(0.0, self._spawned + self._load_seconds - monotonic())
        return max(1, min(MAX_RETRY_AFTER, math.ceil(seconds)))

    def _run(self) -> None:
        run_to_end(self._keep_running, self.ended, (self.planned, self.started))

    def _keep_running(self) -> None:
        """Run one child after the other until `close`.

        Raises:
            ConfigError, EngineFailed: another start would not help.
        """
        while not self._may_start():
            if self._closing.wait(TICK):
                return
        while True:
            reason, served = self._run_once()
            if self._closing.is_set():
                return
            failures = 1 if served >= self._patience.forgiven else self._failures + 1
            self._failures = failures
            if not self.started.done() and self._loading > self._start.engine.load_timeout:
                raise LoadTimeout(reason)
            if not self.started.done():
                raise EngineFailed(f"the engine's process was lost at start: {reason}")
            if failures >= self._patience.max_failures and self._may_give_up():
                raise EngineFailed(f"the engine failed {failures} times in a row, last: {reason}")
            delay = self._patience.delay(failures)
            logger.error("the engine's process was lost: %s; restart in %.1f s", reason, delay)
            self._spawned = monotonic() + delay
            if self._closing.wait(delay):
                return
            self.restarts += 1

    def _may_start(self) -> bool:
        before = self._after
        return before is None or (before.done() and before.exception() is None)

    def _run_once(self) -> tuple[str, float]:
        """Run one child; return why it ended, and for how many seconds it served."""
        try:
            process = EngineProcess(self._command, self._environment, self._listener)
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
            reason, patience = "", 1.0  # it has closed its end, so it will exit soon
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
        """Handle messages until there is a reason to end the process; return it."""
        before = monotonic()
        while not self._closing.is_set():
            frames = process.reader.read() if process.reader.wait(TICK) else []
            for frame in frames:
                if reason := self._handle(process, decode_from_child(frame)):
                    return reason
            if frames or process.reader.in_bulk:
                # A few bytes that complete no frame are no sign of life: they may be heartbeats
                # that the reader takes for the inside of a damaged frame.
                self._silence, process.reader.in_bulk = 0.0, False
                if self._ready_at is not None:
                    self._heard = monotonic()
            else:
                self._silence += passed(before)
            if self._ready_at is None:
                self._loading += passed(before)
            before = monotonic()
            if reason := self._overdue():
                return reason
        process.writer.put(lambda: encode(Close()))
        return "closed"

    def _overdue(self) -> str:
        """Return a reason to end a silent or slowly loading process; empty if there is none."""
        limit = self._start.engine.load_timeout
        if self._ready_at is not None:
            if self._silence > self._patience.silent:
                self._owner.on_silent()
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
        """Handle a message; return a reason to end the process, or an empty string."""
        match message:
            case Heartbeat():
                counters = self._past + message.stats.counters
                self._stats = replace(message.stats, counters=counters)
                self._heartbeats += 1
                if message.stalled > self._start.engine.engine_timeout:
                    return f"the engine has made no progress for {message.stalled:.1f} s"
            case Result() | Failure():
                self._owner.on_answer(message)
            case Planned():
                if not self.planned.done():
                    self.planned.set_result(message.about)
            case Loading():
                self.loaded = (message.done, message.total)
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
        if self.started.done() and not same_model(self.started.result(), limits):
            return "the restarted engine has loaded another model than the first one"
        self._ready_at = monotonic()
        self._load_seconds = self._ready_at - self._spawned
        self._owner.on_ready(process.writer.put)
        if not self.started.done():
            self.started.set_result(limits)
        return ""
