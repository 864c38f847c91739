"""The server's side of an engine that runs in a process of its own."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic

from gpuscore.engine.ticket import resolve
from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout, Unavailable
from gpuscore.processes.worker.process import EngineProcess, Patience
from gpuscore.processes.worker.wire import (
    Cancel,
    Failure,
    FromChild,
    Heartbeat,
    Pipe,
    ProtocolError,
    Ready,
    Refused,
    Result,
    Score,
    Start,
    check_result,
    decoder,
    encode,
)
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import NO_COUNTERS, NO_STATS, EngineStats

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two checks of a silent child
RETRY_AFTER = 5  # seconds that a client should wait for a lost engine
AT_ONCE = 1000  # most items of a request that the caller's thread encodes, in about 0.5 ms


class _Lost(Exception):
    """The reason to end a child."""


class EngineClient:
    """Thread-safe client of an engine's process, the child. A thread starts and watches it, and
    starts another one when it is lost.

    Args:
        command: starts the child (`gpuscore.processes.worker.process.command`).
        start: the model to load, its place, and the engine's limits.
        patience: times and counts after which a child is killed, or not started again.
        everyone: the engines of all models; more may be added later. As long as one of them may
            still serve, a child that failed too often is restarted, too.

    Attributes:
        started: the limits of the first child, once the model is loaded and warm. It raises
            ConfigError if the model cannot be served, LoadTimeout if the child was not ready within
            the `load_timeout`, EngineFailed if it was lost or the client closed before.
        about: the first child's description of the model, once it has started.
        ended: done after `close`; raises EngineFailed if the child fails too often to be restarted.
        pid: the process id of the present child, or else of the last one.
        restarts: the number of restarts so far.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        patience: Patience | None = None,
        everyone: "Sequence[EngineClient]" = (),
    ) -> None:
        self.started: Future[BackendLimits] = Future()
        self.ended: Future[None] = Future()
        self.about = ""
        self.pid: int | None = None
        self.restarts = 0
        self._command = command
        self._start = start
        self._patience = patience or Patience()
        self._everyone = everyone
        self._lock = threading.Lock()
        self._ids = count()
        self._waiting: dict[int, tuple[ScoreRequest, Future[ScoreResult]]] = {}
        self._pipe: Pipe | None = None  # None while no child is ready
        self._closing = threading.Event()
        self._failures = 0  # in a row
        self._stats = NO_STATS  # of the last heartbeat; the counters include `_past`
        self._past = NO_COUNTERS  # of the earlier children
        self._silence = 0.0  # seconds since the last message from the present child
        self._loading = 0.0  # seconds that the present child has been loading
        self._ready_at = 0.0  # time at which the present child was ready
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while a child is ready and sends heartbeats."""
        ready = self._pipe is not None and not self._closing.is_set()
        return ready and self._silence <= self._patience.silent

    @property
    def hopeful(self) -> bool:
        """True while a child is ready or has not failed too often in a row."""
        return self.alive or self._failures < self._patience.max_failures

    @property
    def rate(self) -> float:
        """Tokens per second in well filled batches; 0 while unknown."""
        return self._stats.capacity

    def stats(self) -> EngineStats:
        """Return the stats of the last heartbeat, with counters that add up all children.

        The work of a lost child after its last heartbeat is missing.
        """
        return replace(self._stats, heartbeat_age=self._silence, restarts=self.restarts)

    def score_all(self, requests: Sequence[ScoreRequest]) -> "list[Future[ScoreResult]]":
        """Send requests to the child together, without blocking.

        Cancelling a future drops work that is not launched yet. A future raises Unavailable if no
        child is ready, or if it is lost before it has answered.
        """
        futures: list[Future[ScoreResult]] = [Future() for _ in requests]
        with self._lock:
            pipe = self._pipe if self.alive else None
            ids = [next(self._ids) for _ in requests]
            if pipe is not None:
                self._waiting.update(zip(ids, zip(requests, futures, strict=True), strict=True))
            alone = len(self._waiting) == len(ids) == 1 and len(requests[0].item_ids) <= AT_ONCE
        if pipe is None:
            self._fail(futures, "the engine is not running")
            return futures
        messages = map(Score, ids, requests)
        pipe.put(*(partial(encode, message) for message in messages), now=alone)
        for id, future in zip(ids, futures, strict=True):
            future.add_done_callback(partial(self._on_done, id, pipe))
        return futures

    def close(self) -> None:
        """Fail unanswered requests with `Unavailable`, end the child and wait for its end."""
        self._closing.set()
        self._thread.join()

    def _on_done(self, id: int, pipe: Pipe, future: "Future[ScoreResult]") -> None:
        with self._lock:
            self._waiting.pop(id, None)
        if future.cancelled():
            pipe.put(partial(encode, Cancel(id)))

    def _fail(self, futures: "Sequence[Future[ScoreResult]]", why: str) -> None:
        for future in futures:
            resolve(future, Unavailable(why, retry_after=RETRY_AFTER))

    def _run(self) -> None:
        try:
            self._keep_running()
        except Exception as error:  # noqa: BLE001  (raised by the futures' `result`)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        if not self.started.done():
            end = self.ended.exception() or EngineFailed("the engine was closed")
            self.started.set_exception(end)

    def _keep_running(self) -> None:
        """Run one child after the other until `close`.

        Raises:
            ConfigError, EngineFailed: another start would not help.
        """
        while not self._closing.is_set():
            reason = self._run_once()
            if self._closing.is_set():
                return
            self._failures += 1
            if not self.started.done() and self._loading > self._start.engine.load_timeout:
                raise LoadTimeout(reason)
            if not self.started.done():
                raise EngineFailed(f"the engine process was lost at start: {reason}")
            if not any(engine.hopeful for engine in (self, *self._everyone)):
                raise EngineFailed(
                    f"the engine failed {self._failures} times in a row, last: {reason}"
                )
            logger.error("the engine process was lost: %s; it will be restarted", reason)
            if not self._closing.wait(self._patience.delay):
                self.restarts += 1

    def _run_once(self) -> str:
        """Run one child; return why it ended."""
        try:
            process = EngineProcess(self._command)
        except OSError as error:
            return f"it cannot be started ({error})"
        self.pid = process.pid
        self._loading = 0.0
        reason = ""
        process.pipe.put(partial(encode, self._start), now=True)
        try:
            self._watch(process.pipe)
        except (_Lost, ProtocolError, EOFError) as error:
            reason = str(error)  # empty for an EOFError: the child exits soon
        finally:
            self._child_lost()
            ended = process.end()
        return reason or ended

    def _watch(self, pipe: Pipe) -> None:
        """Handle messages until `close`.

        Raises:
            EOFError, ProtocolError, _Lost: the child is lost.
            ConfigError: the model cannot be served.
        """
        decode: Callable[[bytes], FromChild] = decoder(FromChild)
        before = monotonic()
        while not self._closing.is_set():
            frames = pipe.read(TICK)
            for frame in frames:
                self._handle(decode(frame), pipe)
            since = min(monotonic() - before, 2 * TICK)  # a pause of this process is no silence
            before = monotonic()
            self._silence = 0.0 if frames else self._silence + since
            if self._pipe is not None:
                if self._silence > self._patience.stopped:
                    raise _Lost(f"no sign of life for {self._silence:.1f} s")
                continue
            self._loading += since
            if self._loading > (limit := self._start.engine.load_timeout):
                raise _Lost(
                    "the engine did not load and warm the model within --load-timeout "
                    f"{limit:g} s: something hangs, or the limit is too short for this machine"
                )

    def _handle(self, message: FromChild, pipe: Pipe) -> None:
        match message:
            case Refused():
                kind = _Lost if self.started.done() else ConfigError
                raise kind(message.message)
            case Ready() if self._pipe is None:
                self._ready(message, pipe)
            case Heartbeat():
                counters = self._past + message.stats.counters
                self._stats = replace(message.stats, counters=counters)
                if message.stalled > self._start.engine.engine_timeout:
                    raise _Lost(f"the engine has made no progress for {message.stalled:.1f} s")
                if monotonic() - self._ready_at >= self._patience.forgiven:
                    self._failures = 0
            case Result() | Failure():
                self._answer(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} at the wrong time")

    def _ready(self, message: Ready, pipe: Pipe) -> None:
        if self.started.done() and self.started.result().model != message.limits.model:
            raise _Lost("the restarted engine has loaded another model than the first one")
        with self._lock:
            self._ready_at = monotonic()
            self._silence = 0.0
            self._pipe = pipe
        if not self.started.done():  # last, because a waiting thread may send requests at once
            self.about = message.about
            self.started.set_result(message.limits)

    def _answer(self, answer: Result | Failure) -> None:
        waiting = self._waiting.get(answer.id)
        if waiting is None:
            return  # it was cancelled meanwhile
        request, future = waiting
        resolve(
            future,
            check_result(answer.result, request) if isinstance(answer, Result) else answer.error(),
        )

    def _child_lost(self) -> None:
        """Note that the child is lost, and fail the requests that it has not answered."""
        with self._lock:
            self._pipe = None
            futures = [future for _, future in self._waiting.values()]
        self._past = self._stats.counters
        self._stats = replace(NO_STATS, counters=self._past)
        self._fail(futures, "the engine stopped")
