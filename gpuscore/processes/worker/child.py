"""The engine's process: it loads a model, answers score messages and sends heartbeats."""

import gc
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from gpuscore.backends.base import Prepared
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError
from gpuscore.processes.worker.pipe import Pipe
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
from gpuscore.types.request import ScoreRequest, ScoreResult

logger = logging.getLogger(__name__)

BEAT = 0.25  # seconds between heartbeats
TRIM = 4.0  # seconds without work, after which free memory is given back
LAST = 1.0  # seconds to send the last messages
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
    pipe = Pipe(sock)
    decode: Callable[[bytes], ToChild] = decoder(ToChild)
    try:
        while not (frames := pipe.read()):
            pass
        start = decode(frames[0])
        if len(frames) > 1 or not isinstance(start, Start):
            raise ProtocolError("the first message is not Start alone")
        use_format(start.log_format)
        if start.cores:  # before the framework counts them
            os.sched_setaffinity(0, start.cores)
        worker = _Worker(start, prepare, pipe)
        while worker.take([decode(frame) for frame in pipe.read()]):
            pass
    except EOFError:
        return EXIT_FAILED  # at once: the parent, which would get the results, is gone
    except ConfigError as error:
        pipe.put(Refused(str(error)))
    except Exception:
        logger.exception("the engine's process failed")
        return EXIT_FAILED
    pipe.close(LAST)
    return EXIT_OK


class _Worker:
    """The engine, its heartbeat, and the requests in flight by the ids that the parent gave."""

    def __init__(self, start: Start, prepare: Prepare, pipe: Pipe) -> None:
        self._pipe = pipe
        self._futures: dict[int, Future[ScoreResult]] = {}
        self._answers: deque[tuple[int, Future[ScoreResult]]] = deque()  # of the current step
        self._closing = False
        prepared = prepare(Path(start.directory), start.model)
        self._tell(Planned(prepared.about, prepared.dtype or start.model.dtype))
        backend = prepared.load(lambda done, total: self._tell(Loading(done, total)))
        backend.warmup()
        self._engine = Engine(
            backend,
            prefix_cache=start.engine.prefix_cache,
            after_step=self._send_answers,
            allow_degenerate=start.model.allow_degenerate,
        )
        # The objects made so far are permanent, so later garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        self._tell(Ready(self._engine.limits))
        beat = partial(self._beat, lambda: backend.layers_done)
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def take(self, messages: list[ToChild]) -> bool:
        """Queue and cancel requests, in order; return False after `Close`.

        Raises:
            ProtocolError: a message came at the wrong time.
        """
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
                case Close():
                    self._closing = True
                    self._engine.close()
                    return False
                case _:
                    raise ProtocolError(f"{type(message).__name__} at the wrong time")
        self._score(scores)
        return True

    def _tell(self, message: Message) -> None:
        """Send a message from this thread, because the reading one may be loading the model."""
        self._pipe.put(message, now=True)

    def _score(self, messages: list[Score]) -> None:
        if not messages:
            return
        requests: dict[int, ScoreRequest] = {}
        for message in messages:
            if message.id in self._futures or message.id in requests:
                raise ProtocolError(f"two requests in flight with the id {message.id}")
            try:
                requests[message.id] = check_request(message.request, self._engine.limits)
            except ProtocolError as error:
                logger.error("a malformed request: %s", error)
                self._pipe.put(Failure.of(message.id, error))
        futures = self._engine.score_all(list(requests.values()))
        for id, future in zip(requests, futures, strict=True):
            self._futures[id] = future
            future.add_done_callback(partial(self._answered, id))
        self._send_answers()  # of futures that were done before their callback was added

    def _answered(self, id: int, future: "Future[ScoreResult]") -> None:
        """Note a done future; called in the engine's thread or from `_score`."""
        del self._futures[id]
        if not future.cancelled():
            self._answers.append((id, future))

    def _send_answers(self) -> None:
        """Send all answers of a step at once, to wake the writer and the reader only once."""
        answers = []
        with suppress(IndexError):
            while True:  # until empty: the engine's thread and `_score` may both be here
                answers.append(partial(_answer, *self._answers.popleft()))
        if answers:
            self._pipe.put(*answers, now=len(answers) == 1 and not self._futures)

    def _beat(self, layers_done: Callable[[], int]) -> None:
        """Tell the parent the statistics, and for how long work has made no progress.

        A batch may be long where the CPU is slow or shared: each layer, as far as the backend
        tells, is progress. `running` counts a request until its batch is collected, also if it was
        cancelled meanwhile. After TRIM seconds without work, memory that batches of many sizes left
        in pieces goes back to the system; the next batch then takes a few milliseconds longer.
        """
        progress, since, worked, trimmed = None, monotonic(), monotonic(), 0
        while self._engine.alive:
            stats, now = self._engine.stats(), monotonic()
            made, busy = (stats.counters, layers_done()), stats.requests or stats.running
            if made != progress or not busy:
                progress, since = made, now
            if busy:
                worked = now
            elif now - worked > TRIM and stats.counters.batches > trimmed:
                collect_and_trim()
                trimmed = stats.counters.batches
            if self._pipe.idle:  # else answers are being sent, or the other side does not read
                self._tell(Heartbeat(stats, now - since))
            sleep(BEAT)
        if not self._closing:
            logger.critical("the engine's thread is dead")
            os._exit(EXIT_FAILED)


def _answer(id: int, future: "Future[ScoreResult]") -> bytes:
    """Encode the answer of a done future, in the reading thread or in the engine's."""
    error = future.exception()
    answer: Message = Result(id, future.result()) if error is None else Failure.of(id, error)
    return encode(answer)
