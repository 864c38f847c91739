"""The engine's process: it loads a model, answers score messages and sends heartbeats."""

import gc
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from gpuscore.backends.base import Backend, Pending, Prepared
from gpuscore.batch import PackedBatch, RowScores
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError, GpuscoreError
from gpuscore.heap import collect_and_trim
from gpuscore.limits import BackendLimits
from gpuscore.request import ScoreRequest, ScoreResult
from gpuscore.stats import EngineStats
from gpuscore.worker.frames import FrameReader, FrameWriter, Make, ProtocolError
from gpuscore.worker.messages import (
    Cancel,
    Close,
    Failure,
    Heartbeat,
    Message,
    Planned,
    Ready,
    Refused,
    Result,
    Score,
    Start,
    ToChild,
    decode_to_child,
    encode,
    failure_message,
    result_message,
    to_request,
)

logger = logging.getLogger(__name__)

BEAT = 0.25  # seconds between heartbeats
TRIM = 10.0  # least seconds between two times that free memory is given back
EXIT_OK, EXIT_FAILED = 0, 1

Prepare = Callable[[Path, ModelConfig], Prepared]


def run(sock: socket.socket, prepare: Prepare) -> int:
    """Load the model that `Start` names, then score until `Close`; return the exit code.

    The process also ends when the parent's end of the socket closes.
    """
    writer = FrameWriter(sock, "answers")
    messages = _messages(FrameReader(sock))
    try:
        start, *more = next(messages)
        if more or not isinstance(start, Start):
            raise ProtocolError("the first message is not Start alone")
        if start.cores:  # before the framework counts them
            os.sched_setaffinity(0, start.cores)
        _Worker(start, prepare, writer).serve(messages)
    except EOFError:
        return EXIT_FAILED  # at once: the parent, which would get the results, is gone
    except ConfigError as error:
        _send(writer, Refused(str(error)))
    except Exception:
        logger.exception("the engine's process failed")
        return EXIT_FAILED
    writer.close()
    writer.join(1.0)
    return EXIT_OK


def _messages(reader: FrameReader) -> Iterator[list[ToChild]]:
    """Yield the messages of each receive together."""
    while True:
        if frames := reader.read():
            yield [decode_to_child(frame) for frame in frames]


def _send(writer: FrameWriter, message: Message) -> None:
    writer.put(lambda: encode(message))


class _Worker:
    """The engine, its heartbeat, and the futures of the requests in flight."""

    def __init__(self, start: Start, prepare: Prepare, writer: FrameWriter) -> None:
        prepared = prepare(Path(start.directory), start.model)
        _send(writer, Planned(prepared.about))
        backend = WatchedBackend(prepared.load())
        backend.warmup()
        self._answers: deque[Make] = deque()  # of the current step
        self._engine = Engine(
            backend,
            start.engine,
            after_step=self._send_answers,
            allow_degenerate=start.model.allow_degenerate,
        )
        self._backend, self._writer = backend, writer
        self._futures: dict[int, Future[ScoreResult]] = {}
        self._closing = False
        # The objects made so far are permanent, so later garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        _send(writer, Ready(backend.limits))
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def serve(self, messages: Iterator[list[ToChild]]) -> None:
        for together in messages:
            scores: list[Score] = []
            for message in together:
                match message:
                    case Score():
                        scores.append(message)
                    case Cancel():
                        self._score(scores)
                        scores = []
                        if future := self._futures.get(message.id):
                            future.cancel()
                    case Close():
                        self._closing = True
                        self._engine.close()
                        return
                    case Start():
                        raise ProtocolError("Start twice")
            self._score(scores)

    def _score(self, messages: list[Score]) -> None:
        limits = self._engine.limits
        known: list[int] = []
        requests: list[ScoreRequest] = []
        for message in messages:
            try:
                requests.append(to_request(message, limits.vocab_rows, limits.label_rows))
                known.append(message.id)
            except ProtocolError as error:
                logger.error("a malformed request: %s", error)
                _send(self._writer, failure_message(message.id, error))
        for id, outcome in zip(known, self._engine.score_all(requests), strict=True):
            if isinstance(outcome, GpuscoreError):
                _send(self._writer, failure_message(id, outcome))
            else:
                self._futures[id] = outcome
                outcome.add_done_callback(partial(self._answer, id))
        self._send_answers()  # of futures that were done before their callback was added

    def _answer(self, id: int, future: "Future[ScoreResult]") -> None:
        """Queue the answer of a done future; the writer's thread encodes it.

        Called in the engine's thread or from `_score`.
        """
        del self._futures[id]
        if not future.cancelled():
            self._answers.append(lambda: encode(_outcome(id, future)))

    def _send_answers(self) -> None:
        """Send all answers of a step at once, to wake the writer and the parent only once."""
        answers = []
        with suppress(IndexError):
            while True:  # until empty: the engine's thread and `_score` may both be here
                answers.append(self._answers.popleft())
        if answers:
            self._writer.put(*answers)

    def _beat(self) -> None:
        idle = IdleTrimmer()
        while self._engine.alive:
            stats = self._engine.stats()
            idle.seen(stats)
            stalled = self._backend.stalled(working=stats.requests > 0)
            if self._writer.idle:  # else answers are being sent, or the parent does not read
                _send(self._writer, Heartbeat(stats, stalled))
            sleep(BEAT)
        if not self._closing:
            logger.critical("the engine's thread is dead")
            os._exit(EXIT_FAILED)


class IdleTrimmer:
    """Uses an engine's idle moments to give memory back, which batches of many sizes leave in
    pieces. The next batch takes some of it again: a few milliseconds, at most once in TRIM."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._trimmed = clock, clock()
        self._batches = 0  # that had run then

    def seen(self, stats: EngineStats) -> None:
        batches = stats.counters.batches
        if stats.requests or batches == self._batches or self._clock() - self._trimmed < TRIM:
            return
        collect_and_trim()
        self._trimmed, self._batches = self._clock(), batches


def _outcome(id: int, future: "Future[ScoreResult]") -> Result | Failure:
    error = future.exception()
    return result_message(id, future.result()) if error is None else failure_message(id, error)


class WatchedBackend:
    """A backend that measures for how long the engine has made no progress."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = monotonic) -> None:
        self._backend, self._clock = backend, clock
        self._since = clock()  # start or end of the last call
        self._busy = False

    @property
    def limits(self) -> BackendLimits:
        return self._backend.limits

    def warmup(self) -> None:
        self._backend.warmup()

    def extend(self, batch: PackedBatch) -> Pending:
        with self:
            return self._backend.extend(batch)

    def collect(self, pending: Pending) -> RowScores:
        with self:
            return self._backend.collect(pending)

    def close(self) -> None:
        self._backend.close()

    def stalled(self, working: bool) -> float:
        """Return the seconds since the last call began or ended; 0 without work and open call.

        An open call counts even if all its requests were cancelled meanwhile.
        """
        now = self._clock()
        if not working and not self._busy:
            self._since = now
        return max(0.0, now - self._since)

    def __enter__(self) -> None:
        self._since, self._busy = self._clock(), True

    def __exit__(self, *_: object) -> None:
        self._since, self._busy = self._clock(), False
