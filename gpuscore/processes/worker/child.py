"""The engine process: it loads a model, answers score messages and sends heartbeats."""

import gc
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from gpuscore.backends.base import Prepared
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError
from gpuscore.exits import EXIT_FAILED, EXIT_OK
from gpuscore.processes.worker.wire import (
    Cancel,
    Failure,
    Heartbeat,
    Message,
    Pipe,
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
from gpuscore.types.request import ScoreRequest, ScoreResult

logger = logging.getLogger(__name__)

BEAT = 0.25  # seconds between heartbeats
TRIM = 4.0  # seconds without work, after which free memory is given back

Prepare = Callable[[Path, ModelConfig], Prepared]


def run(sock: socket.socket, prepare: Prepare) -> int:
    """Load the model that `Start` names, then score until the parent's end of the socket closes;
    return the exit code."""
    started: Callable[[bytes], Start] = decoder(Start)
    decode: Callable[[bytes], ToChild] = decoder(ToChild)
    with closing(Pipe(sock)) as pipe:
        try:
            while not (frames := pipe.read()):
                pass
            start = started(frames[0])
            os.environ.update(start.place.environment)
            if start.place.cores:  # before the framework counts them
                os.sched_setaffinity(0, start.place.cores)
            worker = _Worker(start, prepare, pipe)
            while True:
                worker.take([decode(frame) for frame in pipe.read()])
        except EOFError:
            return EXIT_OK  # at once: the parent wants no more results, or is gone
        except ConfigError as error:
            pipe.put(partial(encode, Refused(str(error))), now=True)
            return EXIT_OK
        except Exception:
            logger.exception("the engine process failed")
            return EXIT_FAILED


class _Worker:
    """The engine, its heartbeat, and the requests in flight by the ids that the parent gave."""

    def __init__(self, start: Start, prepare: Prepare, pipe: Pipe) -> None:
        self._pipe = pipe
        self._futures: dict[int, Future[ScoreResult]] = {}
        self._answers: deque[Callable[[], bytes]] = deque()  # of the current step
        model = start.place.model
        prepared = prepare(Path(start.directory), model)
        backend = prepared.load()
        backend.warmup()
        self._engine = Engine(
            backend,
            prefix_cache=start.engine.prefix_cache,
            after_step=self._send_answers,
            allow_degenerate=model.allow_degenerate,
        )
        # The objects made so far are permanent, so later garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        self._tell(Ready(self._engine.limits, prepared.about))
        beat = partial(self._beat, lambda: backend.layers_done)
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def take(self, messages: list[ToChild]) -> None:
        """Queue requests, then cancel those that a later message cancels."""
        self._score([message for message in messages if isinstance(message, Score)])
        for message in messages:
            if isinstance(message, Cancel) and (future := self._futures.get(message.id)):
                future.cancel()

    def _tell(self, message: Message) -> None:
        """Send a message at once, from the calling thread."""
        self._pipe.put(partial(encode, message), now=True)

    def _score(self, messages: list[Score]) -> None:
        if not messages:
            return
        requests: dict[int, ScoreRequest] = {}
        for message in messages:
            try:
                requests[message.id] = check_request(message.request, self._engine.limits)
            except ProtocolError as error:
                logger.error("a malformed request: %s", error)
                self._answers.append(partial(encode, Failure.of(message.id, error)))
        futures = self._engine.score_all(list(requests.values()))
        for id, future in zip(requests, futures, strict=True):
            self._futures[id] = future
            future.add_done_callback(partial(self._on_done, id))
        self._send_answers()  # of futures that were done before their callback was added

    def _on_done(self, id: int, future: "Future[ScoreResult]") -> None:
        """Note a done future; called in the engine's thread or from `_score`."""
        del self._futures[id]
        if not future.cancelled():
            self._answers.append(partial(_encode_answer, id, future))

    def _send_answers(self) -> None:
        """Send all answers of a step at once, to wake the writer and the reader only once."""
        answers = []
        with suppress(IndexError):
            while True:  # until empty: the engine's thread and `_score` may both be here
                answers.append(self._answers.popleft())
        if answers:
            self._pipe.put(*answers, now=len(answers) == 1 and not self._futures)

    def _beat(self, layers_done: Callable[[], int]) -> None:
        """Tell the parent the statistics, and for how long work has made no progress.

        A batch can take long on a slow or shared CPU. So each layer counts as progress, if the
        backend reports its layers. `running` counts a request until its batch is collected, also
        if it was cancelled meanwhile. After TRIM seconds without work, fragmented free memory goes
        back to the system; the next batch then takes a few milliseconds longer.
        """
        progress = None
        since = monotonic()
        worked = monotonic()
        trimmed = 0
        while self._engine.alive:
            stats = self._engine.stats()
            now = monotonic()
            counts = (stats.counters, layers_done())
            busy = stats.requests or stats.running
            moved = counts != progress  # a short batch may begin and end between two beats
            if moved or not busy:
                progress = counts
                since = now
            if moved or busy:
                worked = now
            elif now - worked > TRIM and stats.counters.batches > trimmed:
                collect_and_trim()
                trimmed = stats.counters.batches
            if self._pipe.idle:  # else answers are being sent, or the other side does not read
                self._tell(Heartbeat(stats, now - since))
            sleep(BEAT)
        logger.critical("the engine's thread is dead")
        os._exit(EXIT_FAILED)


def _encode_answer(id: int, future: "Future[ScoreResult]") -> bytes:
    """Encode the answer of a done future, in the reading thread or in the engine's."""
    error = future.exception()
    answer: Message = Result(id, future.result()) if error is None else Failure.of(id, error)
    return encode(answer)
