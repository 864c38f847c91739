"""The parent of the fronts: starts fronts, replaces fronts that end, and passes signals on."""

import logging
import os
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from types import FrameType

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError, EngineFailed
from gpuscore.processes.fronts.board import Board, Totals
from gpuscore.processes.fronts.forker import Forker, FrontMain
from gpuscore.processes.fronts.front import FrontApp, run_front
from gpuscore.processes.fronts.messages import (
    AskCounts,
    AskSums,
    Began,
    Counted,
    Ended,
    FromFront,
    GiveUp,
    Serving,
    Stop,
    Sums,
    ValidKeys,
    decode_from_front,
)
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.start import AllReplicas
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, Message, ProtocolError
from gpuscore.processes.worker.process import EngineListener
from gpuscore.server.http.address import bind_all
from gpuscore.server.http.auth import ApiKeys, KeyReader
from gpuscore.server.stopping import (
    EXIT_OK,
    EXIT_SIGNAL,
    FORCED_EXIT,
    StopLines,
    handling,
    stop_signals,
)

logger = logging.getLogger(__name__)

TICK = 0.25  # seconds between two looks at what is due
DELAY = 0.1  # seconds before a front is replaced that never served; doubled with each further one
SILENT = 10.0  # seconds without a message, after which a front is killed; they report every second
MAX_FAILURES = 5  # fronts in a row that ended before they served; then the server ends
# Seconds that fronts may take to end after their own time limit, after one signal or a second one.
SPARE, FORCED_SPARE = 5.0, 0.5


class RunningFront:
    """The parent's end of a front's control socket, and what the front has said."""

    def __init__(self, seat: int, sock: socket.socket) -> None:
        self.seat, self.sock = seat, sock
        self.pid: int | None = None
        self.served = False
        self.ended: Ended | None = None
        self.silence = 0.0  # seconds since its last message
        self.reader = FrameReader(sock)
        self.writer = FrameWriter(sock, "front-writer")

    def kill(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class FrontSetup:
    """Memory and sockets that fronts and engines share; make it before their processes.

    Args:
        fronts: number of HTTP processes.
        engines: number of engines of each model.
    """

    def __init__(self, fronts: int, engines: Sequence[int]) -> None:
        self.board = Board(fronts, sum(engines), len(engines))
        self.listeners = [EngineListener() for _ in range(sum(engines))]

    def forker(self, prepare: Callable[[str], FrontApp]) -> Forker:
        """Start the process that forks fronts; call it in the main thread, before there are others.

        Args:
            prepare: makes the application, in that process, from the text that `Forker.prepare`
                gets.
        """
        return Forker(partial(self._main, prepare))

    def _main(self, prepare: Callable[[str], FrontApp], text: str) -> FrontMain:
        addresses = [listener.address for listener in self.listeners]
        return partial(run_front, prepare(text), self.board, addresses)


class Fronts:
    """The fronts of a server, from their start to their end; all methods run in the main thread.

    Args:
        setup: the memory and sockets that they share.
        forker: starts them; prepared.
        config: of the server.
        keys: the API keys; read again at SIGHUP, if there is a key file.
        replicas: of all engines, started with the listeners of `setup`; their models are planned.
        announce: called once, when all fronts can score, with the lines of one of them.
        say: prints a line for people without blocking.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        setup: FrontSetup,
        forker: Forker,
        config: ServerConfig,
        keys: ApiKeys,
        replicas: Replicas | AllReplicas,
        announce: Callable[[str], None],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._forker, self._board, self._config = forker, setup.board, config
        self._keys, self._key_reader = keys, KeyReader(config, keys)
        # One for each front. They stay open here, so that connections wait for the replacement of a
        # front that has ended.
        self._listeners = bind_all(config, config.http_workers)
        self._replicas, self._engines = replicas, replicas.engines
        self._about = tuple(engine.planned.result() for engine in self._engines)
        self._announce: Callable[[str], None] | None = announce
        self._lines = StopLines(say)
        self._fronts: dict[int, RunningFront] = {}  # by seat
        self._due: dict[int, float] = dict.fromkeys(range(self._board.fronts), 0.0)  # next starts
        self._totals = Totals()
        self._failures = 0  # fronts in a row that ended without having served
        self._stopping = 0  # the first signal's number
        self._stop_by = float("inf")
        self._codes: list[int] = []
        self._error: Exception | None = None
        self._signals: deque[int] = deque()  # received
        self._failed: deque[Exception] = deque()  # of the engines
        self._new_keys = threading.Event()
        self._engine_ready = False
        self._looked = monotonic()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def run(self) -> int:
        """Serve until a signal or a failure, and until all fronts have ended; return the exit code.

        Raises:
            ConfigError: the model or a setting cannot be served.
            EngineFailed: the engine or the fronts were lost, at start or too often since.
        """
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._watch, daemon=True).start()
        with self._handling_signals():
            while self._fronts or not self._ending:
                self._start_due()
                for key, _ in self._selector.select(self._patience):
                    if key.data is not None:
                        self._read(key.data)
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._look()
        if self._error is not None:
            raise self._error
        code = max(self._codes, default=EXIT_OK)
        self._lines.stopped(code != EXIT_OK)
        return code

    @property
    def _patience(self) -> float:
        """Seconds until something may be due."""
        starts = [] if self._ending else self._due.values()
        return min([TICK, *(max(0.0, start - monotonic()) for start in starts)])

    @property
    def _ending(self) -> bool:
        return bool(self._stopping) or self._error is not None

    # ---- signals, keys and engines: noted anywhere, acted on by the loop ----

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Note signals that stop the server or make it read its keys again, and end a wait."""
        hangup = [signal.SIGHUP] if self._config.api_key_file is not None else []
        with handling([*stop_signals(self._config), *hangup], self._note):
            waker = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(waker)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _watch(self) -> None:
        """Wait for the engines, in a thread."""
        try:
            self._replicas.wait_ready()
            self._engine_ready = True
            self._replicas.wait_ended()
        except Exception as error:  # noqa: BLE001  (raised by `run`, in the main thread)
            self._failed.append(error)
            self._wake_up()

    def _read_keys(self) -> None:
        """Read the keys again, in a thread, because the disk may be slow."""
        self._key_reader.read()
        self._new_keys.set()
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError):  # it has been woken often, or the server has ended
            self._wake.send(b" ")

    def _act(self) -> None:
        """Act on the noted signals and events."""
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGHUP and self._config.api_key_file is not None:
                threading.Thread(target=self._read_keys, name="api-keys", daemon=True).start()
            else:
                self._stop(number)
        while self._failed:
            self._fail(self._failed.popleft())
        if self._new_keys.is_set():
            self._new_keys.clear()
            self._tell_all(ValidKeys(self._keys.digests))

    def _stop(self, number: int) -> None:
        """Drain at the first signal; end at the second."""
        again, self._stopping = bool(self._stopping), self._stopping or number
        drain = self._config.drain_seconds + SPARE
        self._stop_by = monotonic() + (FORCED_EXIT + FORCED_SPARE if again else drain)
        self._tell_all(Stop(self._stopping))

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._stop_by = min(self._stop_by, monotonic() + SPARE)
        self._tell_all(GiveUp(str(error)))

    def _tell_all(self, message: Message) -> None:
        for front in self._fronts.values():
            front.writer.send(message)

    # ---- fronts ----

    def _start_due(self) -> None:
        now = monotonic()
        for seat in [seat for seat, due in self._due.items() if due <= now and not self._ending]:
            del self._due[seat]
            try:
                sock = self._forker.fork(
                    seat, self._about, self._engine_ready, self._listeners[seat]
                )
            except EngineFailed as error:
                self._fail(error)
                return
            self._fronts[seat] = RunningFront(seat, sock)
            self._fronts[seat].writer.send(ValidKeys(self._keys.digests))
            self._selector.register(sock, selectors.EVENT_READ, self._fronts[seat])

    def _read(self, front: RunningFront) -> None:
        front.silence = 0.0
        try:
            for frame in front.reader.read():
                self._handle(front, decode_from_front(frame))
        except (EOFError, OSError):
            self._lost(front)
        except ProtocolError as error:
            logger.error("HTTP worker %s sent %s", front.pid, error)
            front.kill()  # which ends the connection, too

    def _handle(self, front: RunningFront, message: FromFront) -> None:
        match message:
            case Began():
                front.pid = message.pid
            case Serving():
                front.served, self._failures = True, 0
                if self._announce and all(seat.served for seat in self._all()):
                    self._announce(message.text)
                    self._announce = None
            case Counted():
                self._totals.report(front.seat, message.counts, message.number)
            case AskSums():
                self._totals.report(front.seat, message.counts)
                others = [other for other in self._fronts.values() if other is not front]
                seats = [other.seat for other in others]
                number = self._totals.ask(front.seat, message.number, seats)
                for other in others:
                    other.writer.send(AskCounts(number))
            case Ended():
                front.ended = message

    def _all(self) -> list[RunningFront]:
        """Return all fronts; none while one of them is missing."""
        return [] if self._due else list(self._fronts.values())

    def _lost(self, front: RunningFront) -> None:
        """Note the end of a front; have it replaced unless the server ends."""
        self._selector.unregister(front.sock)
        front.writer.hang_up()
        del self._fronts[front.seat]
        self._totals.lost(front.seat)
        self._board.clear(front.seat)
        if front.ended is not None and front.ended.refusal is not None:
            self._fail(ConfigError(front.ended.refusal))
        if self._ending:
            self._codes.append(front.ended.code if front.ended else EXIT_SIGNAL + self._stopping)
            return
        self._failures += not front.served
        logger.error("HTTP worker %s was lost; another takes its place", front.pid)
        if self._failures >= MAX_FAILURES:
            self._fail(EngineFailed(f"{MAX_FAILURES} HTTP workers in a row ended at their start"))
            return
        delay = 0.0 if front.served else DELAY * 2 ** (self._failures - 1)
        self._due[front.seat] = monotonic() + delay

    def _look(self) -> None:
        """Check the fronts and timers, and act on everything that is due."""
        self._act()
        for seat, number, samples in self._totals.answers():
            stats = [engine.stats() for engine in self._engines]
            self._fronts[seat].writer.send(Sums(number, samples, stats))
        for index, engine in enumerate(self._engines):
            self._board.set_retry_after(index, engine.retry_after)
        self._end_silent()
        if self._stopping:
            left = max(0.0, min(self._stop_by - monotonic(), self._config.drain_seconds))
            self._lines.waiting(self._board.requests, left)
        if self._ending:
            for listener in self._listeners:  # from now on, each front closes its own at its end
                listener.close()
            if monotonic() >= self._stop_by:
                for front in self._fronts.values():
                    front.kill()
                self._stop_by = float("inf")

    def _end_silent(self) -> None:
        # A pause of this process, or of the machine, is not the fronts' silence.
        passed, self._looked = min(monotonic() - self._looked, 2 * TICK), monotonic()
        for front in self._fronts.values():
            front.silence += passed
            if front.silence > SILENT:
                logger.error("HTTP worker %s gives no sign of life", front.pid)
                front.silence = 0.0
                front.kill()
