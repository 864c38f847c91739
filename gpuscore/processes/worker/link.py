"""A front's way to an engine that another process supervises."""

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from gpuscore.errors import EngineFailed
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, ProtocolError
from gpuscore.processes.worker.messages import (
    Failure,
    FromChild,
    Heartbeat,
    Ready,
    Result,
    decode_from_child,
)
from gpuscore.processes.worker.patience import (
    TICK,
    ChildListener,
    Patience,
    Report,
    passed,
    same_model,
)
from gpuscore.types.limits import BackendLimits
from gpuscore.types.stats import NO_STATS, EngineStats

logger = logging.getLogger(__name__)


class FrontLink:
    """The thread that connects to an engine's listener, again after each loss, and reads.

    The engine's supervisor in another process notices losses and hangs and ends the engine; here
    they only show.

    Args:
        address: of the `EngineListener`.
        about: the supervised child's description of its model.
        owner: receives the engine's events.
        retry_after: returns whole seconds until a lost engine may be ready.
    """

    def __init__(
        self, address: str, about: str, owner: ChildListener, retry_after: Callable[[], int]
    ) -> None:
        self.planned: Future[str] = Future()
        self.planned.set_result(about)
        self.started: Future[BackendLimits] = Future()
        self.ended: Future[None] = Future()
        self.loaded = (0, 0)  # its supervisor knows
        self._address, self._owner, self._retry_after = address, owner, retry_after
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._heartbeats = 0  # so far
        self._stats = NO_STATS  # of the last heartbeat
        self._told: EngineStats | None = None  # by the supervisor
        self._ready = False
        self._silence = 0.0
        self._heard = monotonic()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; block until it has ended."""
        self._closing.set()
        self._thread.join()
        self._settle(EngineFailed("the engine was closed"), None)

    def fail(self, error: Exception) -> None:
        """Note that the engine has failed for good."""
        self._settle(error, error)

    def tell(self, stats: EngineStats) -> None:
        """Note the supervisor's statistics, whose counters add up all the engine's processes."""
        self._told = stats

    @property
    def healthy(self) -> bool:
        """True if the engine is ready and has been silent for at most `Patience.silent` seconds."""
        return self._ready and self._silence <= Patience().silent

    @property
    def stats(self) -> EngineStats:
        """The supervisor's last statistics, or else those of the last heartbeat."""
        if self._told is not None:
            return self._told
        return replace(self._stats, heartbeat_age=max(0.0, monotonic() - self._heard))

    @property
    def reported(self) -> Report:
        """The last heartbeat's account of the engine's work, which includes other fronts'."""
        return Report(self._heartbeats, self._stats.tokens_left, alone=False)

    @property
    def rate(self) -> float:
        """Tokens per second in well filled batches, by the last heartbeat; 0 while unknown."""
        return self._stats.capacity

    @property
    def retry_after(self) -> int:
        return self._retry_after()

    def _settle(self, error: Exception, end: Exception | None) -> None:
        with self._lock:
            if not self.started.done():
                self.started.set_exception(error)
            if not self.ended.done():
                if end is None:
                    self.ended.set_result(None)
                else:
                    self.ended.set_exception(end)

    def _run(self) -> None:
        while not self._closing.is_set():
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    sock.connect(self._address)
                    self._read(sock)
                except (EOFError, OSError):
                    pass  # the engine was lost, or nobody listens because the server ends
                except ProtocolError as error:
                    logger.error("the connection to the engine was closed: it sent %s", error)
            self._closing.wait(TICK)

    def _read(self, sock: socket.socket) -> None:
        """Handle the engine's messages until it is lost, or until `close`."""
        writer = FrameWriter(sock, "engine-writer")
        reader = FrameReader(sock)
        before = monotonic()
        try:
            while not self._closing.is_set():
                frames = reader.read() if reader.wait(TICK) else []
                for frame in frames:
                    self._handle(decode_from_child(frame), writer)
                if frames or reader.in_bulk:
                    self._silence, reader.in_bulk = 0.0, False
                    self._heard = monotonic()
                else:
                    self._silence += passed(before)
                    if self._ready and not self.healthy:
                        self._owner.on_silent()
                before = monotonic()
        finally:
            self._ready = False
            self._stats = NO_STATS
            self._owner.on_lost()
            with suppress(OSError):  # the other end may be gone
                sock.shutdown(socket.SHUT_RDWR)  # wakes a writer that waits for a full socket
            writer.close()
            writer.join(1.0)

    def _handle(self, message: FromChild, writer: FrameWriter) -> None:
        match message:
            case Heartbeat():
                self._stats = message.stats
                self._heartbeats += 1
            case Result() | Failure():
                self._owner.on_answer(message)
            case Ready() if not self._ready:
                self._on_ready(message.limits, writer)
            case _:
                raise ProtocolError(f"{type(message).__name__} at the wrong time")

    def _on_ready(self, limits: BackendLimits, writer: FrameWriter) -> None:
        if self.started.done() and (
            self.started.exception() or not same_model(self.started.result(), limits)
        ):
            return  # the engine has failed for good, or its supervisor will end it
        self._ready = True
        self._owner.on_ready(writer.put)  # before anybody who waits for `started` goes on
        with self._lock:
            if not self.started.done():
                self.started.set_result(limits)
