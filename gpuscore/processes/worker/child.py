"""The engine's process: it loads a model, answers score messages and sends heartbeats."""

import gc
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from gpuscore.backends.base import Backend, Pending, Prepared
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError, GpuscoreError
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, Make
from gpuscore.processes.worker.wire import (
    Cancel,
    Close,
    Failure,
    Heartbeat,
    Loading,
    Message,
    Planned,
    ProtocolError,
    Ready,
    Refused,
    Result,
    Score,
    Start,
    ToChild,
    check_request,
    decoder,
    encode,
)
from gpuscore.system.heap import collect_and_trim
from gpuscore.system.log import LogFormat
from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats

logger = logging.getLogger(__name__)

BEAT = 0.25  # seconds between heartbeats
REPORT = 0.1  # seconds between reports of the weights that were read
TRIM = 4.0  # least seconds between two times that free memory is given back
EXIT_OK, EXIT_FAILED = 0, 1

Prepare = Callable[[Path, ModelConfig], Prepared]


def run(
    sock: socket.socket,
    prepare: Prepare,
    use_format: Callable[[LogFormat], None] = lambda style: None,
) -> int:
    """Load the model that `Start` names, then score until `Close`; return the exit code.

    The process also ends when the parent's end of the socket closes. `use_format` sets the format
    of the log, which `Start` names.
    """
    writer = FrameWriter(sock, "answers")
    messages = messages_of(FrameReader(sock))
    try:
        start, *more = next(messages)
        if more or not isinstance(start, Start):
            raise ProtocolError("the first message is not Start alone")
        use_format(start.log_format)
        if start.cores:  # before the framework counts them
            os.sched_setaffinity(0, start.cores)
        _Worker(start, prepare, writer).serve(messages)
    except EOFError:
        return EXIT_FAILED  # at once: the parent, which would get the results, is gone
    except ConfigError as error:
        writer.send(Refused(str(error)))
    except Exception:
        logger.exception("the engine's process failed")
        return EXIT_FAILED
    writer.close()
    return EXIT_OK


class _Worker:
    """The engine, its requests and its heartbeat."""

    def __init__(self, start: Start, prepare: Prepare, writer: FrameWriter) -> None:
        prepared = prepare(Path(start.directory), start.model)
        writer.send(Planned(prepared.about, prepared.dtype or start.model.dtype))
        backend = WatchedBackend(prepared.load(LoadingReport(writer)))
        backend.warmup()
        self._engine = Engine(
            backend,
            start.engine,
            after_step=lambda: self._requests.send_answers(),
            allow_degenerate=start.model.allow_degenerate,
        )
        self._backend = backend
        self._requests = Requests(self._engine, writer)
        self._closing = False
        # The objects made so far are permanent, so later garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        writer.send(Ready(self._engine.limits))
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def serve(self, messages: Iterator[list[ToChild]]) -> None:
        """Serve the supervisor until its `Close`."""
        for together in messages:
            if isinstance(together[-1], Close):
                self._closing = True
                self._engine.close()
                return
            self._requests.take(together)

    def _beat(self) -> None:
        idle = IdleTrimmer()
        while self._engine.alive:
            stats = self._engine.stats()
            idle.seen(stats)
            stalled = self._backend.stalled(working=stats.requests > 0)
            self._requests.send_if_idle(Heartbeat(stats, stalled))
            sleep(BEAT)
        if not self._closing:
            logger.critical("the engine's thread is dead")
            os._exit(EXIT_FAILED)


class LoadingReport:
    """Tells the supervisor how many bytes of weights are read, at most a few times a second."""

    def __init__(self, writer: FrameWriter) -> None:
        self._writer, self._told = writer, 0.0

    def __call__(self, done: int, total: int) -> None:
        if done >= total or monotonic() - self._told >= REPORT:
            self._told = monotonic()
            self._writer.send(Loading(done, total))


class IdleTrimmer:
    """Gives memory that batches of many sizes left in pieces back to the system, while the engine
    is idle. The next batch then takes a few milliseconds longer, at most once in TRIM seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._trimmed = clock, clock()
        self._batches = 0  # that had run then

    def seen(self, stats: EngineStats) -> None:
        batches = stats.counters.batches
        if stats.requests or batches == self._batches or self._clock() - self._trimmed < TRIM:
            return
        collect_and_trim()
        self._trimmed, self._batches = self._clock(), batches


class WatchedBackend:
    """A backend that measures for how long the engine has made no progress."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = monotonic) -> None:
        self._backend, self._clock = backend, clock
        self._since = clock()  # start or end of the last call, or its last layer that was seen
        self._busy = False
        self._layers = 0

    @property
    def limits(self) -> BackendLimits:
        return self._backend.limits

    @property
    def layers_done(self) -> int:
        return self._backend.layers_done

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
        """Return the seconds without progress: since a call began or ended, or a layer was done.

        It is 0 without work and open call. An open call counts even if all its requests were
        cancelled meanwhile. A batch may be long where the CPU is slow or shared: each layer, as far
        as the backend tells, is progress.
        """
        now, layers = self._clock(), self._backend.layers_done
        if layers != self._layers or not (working or self._busy):
            self._since, self._layers = now, layers
        return max(0.0, now - self._since)

    def __enter__(self) -> None:
        self._since, self._busy = self._clock(), True

    def __exit__(self, *_: object) -> None:
        self._since, self._busy = self._clock(), False


def messages_of(reader: FrameReader) -> Iterator[list[ToChild]]:
    """Yield the messages of each receive together."""
    decode: Callable[[bytes], ToChild] = decoder(ToChild)
    while True:
        if frames := reader.read():
            yield [decode(frame) for frame in frames]


class Requests:
    """The requests in flight, by the ids that the supervisor gave them."""

    def __init__(self, engine: Engine, writer: FrameWriter) -> None:
        self._engine, self._writer = engine, writer
        self._futures: dict[int, Future[ScoreResult]] = {}
        self._answers: deque[Make] = deque()  # of the current step

    def take(self, messages: Iterable[ToChild]) -> None:
        """Queue and cancel requests, in order; raise ProtocolError for any other message."""
        scores: list[Score] = []
        for message in messages:
            match message:
                case Score():
                    scores.append(message)
                case Cancel():
                    self._score(scores)
                    scores = []
                    if future := self._futures.get(message.id):
                        future.cancel()
                case _:
                    raise ProtocolError(f"{type(message).__name__} at the wrong time")
        self._score(scores)

    def send_if_idle(self, message: Message) -> None:
        """Send a message unless answers are being sent, or the other side does not read."""
        if self._writer.idle:
            self._writer.send(message)

    def send_answers(self) -> None:
        """Send all answers of a step at once, to wake the writer and the reader only once."""
        answers = []
        with suppress(IndexError):
            while True:  # until empty: the engine's thread and `_score` may both be here
                answers.append(self._answers.popleft())
        if answers:
            self._writer.put(*answers, now=len(answers) == 1 and not self._futures)

    def _score(self, messages: list[Score]) -> None:
        limits = self._engine.limits
        requests: dict[int, ScoreRequest] = {}
        for message in messages:
            if message.id in self._futures or message.id in requests:
                raise ProtocolError(f"two requests in flight with the id {message.id}")
            try:
                requests[message.id] = check_request(message.request, limits)
            except ProtocolError as error:
                logger.error("a malformed request: %s", error)
                self._writer.send(Failure.of(message.id, error))
        outcomes = self._engine.score_all(list(requests.values()))
        for id, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, GpuscoreError):
                self._writer.send(Failure.of(id, outcome))
            else:
                self._futures[id] = outcome
                outcome.add_done_callback(partial(self._answer, id))
        self.send_answers()  # of futures that were done before their callback was added

    def _answer(self, id: int, future: "Future[ScoreResult]") -> None:
        """Queue the answer of a done future; the writer's thread encodes it.

        Called in the engine's thread or from `_score`.
        """
        del self._futures[id]
        if not future.cancelled():
            self._answers.append(lambda: encode(_outcome(id, future)))


def _outcome(id: int, future: "Future[ScoreResult]") -> Result | Failure:
    error = future.exception()
    return Result(id, future.result()) if error is None else Failure.of(id, error)
