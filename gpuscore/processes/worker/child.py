"""The engine's process: it loads a model, answers score messages and sends heartbeats."""

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

from gpuscore.backends.base import Backend, Pending, Prepared
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError
from gpuscore.processes.worker.caller import Reception, messages_of
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, ProtocolError
from gpuscore.processes.worker.messages import (
    Close,
    Heartbeat,
    Loading,
    Message,
    Planned,
    Refused,
    Start,
    ToChild,
    encode,
)
from gpuscore.system.heap import collect_and_trim
from gpuscore.system.log import LogFormat
from gpuscore.types.batch import PackedBatch, RowScores
from gpuscore.types.limits import BackendLimits
from gpuscore.types.stats import EngineStats

logger = logging.getLogger(__name__)

BEAT = 0.25  # seconds between heartbeats
REPORT = 0.1  # seconds between reports of the weights that were read
TRIM = 10.0  # least seconds between two times that free memory is given back
EXIT_OK, EXIT_FAILED = 0, 1

Prepare = Callable[[Path, ModelConfig], Prepared]


def run(
    sock: socket.socket,
    prepare: Prepare,
    listener: socket.socket | None = None,
    use_format: Callable[[LogFormat], None] = lambda style: None,
) -> int:
    """Load the model that `Start` names, then score until `Close`; return the exit code.

    The process also ends when the parent's end of the socket closes. Processes that connect to the
    listener can score too. `use_format` sets the format of the log, which `Start` names.
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
        _Worker(start, prepare, writer, listener).serve(messages)
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


def _send(writer: FrameWriter, message: Message) -> None:
    writer.put(lambda: encode(message))


class _Worker:
    """The engine, its callers and its heartbeat."""

    def __init__(
        self,
        start: Start,
        prepare: Prepare,
        writer: FrameWriter,
        listener: socket.socket | None,
    ) -> None:
        prepared = prepare(Path(start.directory), start.model)
        _send(writer, Planned(prepared.about))
        backend = WatchedBackend(prepared.load(LoadingReport(writer)))
        backend.warmup()
        degenerate = start.model.allow_degenerate
        self._reception = Reception(
            lambda after_step: Engine(
                backend, start.engine, after_step=after_step, allow_degenerate=degenerate
            )
        )
        self._engine, self._backend = self._reception.engine, backend
        self._closing = False
        # The objects made so far are permanent, so later garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        self._supervisor = self._reception.add(writer)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if listener is not None:
            threading.Thread(
                target=self._reception.listen, args=(listener,), name="reception", daemon=True
            ).start()

    def serve(self, messages: Iterator[list[ToChild]]) -> None:
        """Serve the supervisor until its `Close`."""
        for together in messages:
            if isinstance(together[-1], Close):
                self._closing = True
                self._engine.close()
                return
            self._supervisor.take(together)

    def _beat(self) -> None:
        idle = IdleTrimmer()
        while self._engine.alive:
            stats = self._engine.stats()
            idle.seen(stats)
            stalled = self._backend.stalled(working=stats.requests > 0)
            self._reception.beat(Heartbeat(stats, stalled))
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
            _send(self._writer, Loading(done, total))


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
