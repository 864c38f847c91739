"""A front: one of the server's HTTP processes, controlled by the parent."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from gpuscore.config import EngineConfig, ServerConfig
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import ConfigError, EngineFailed, Unavailable
from gpuscore.processes.fronts.board import Board
from gpuscore.processes.fronts.messages import (
    AskCounts,
    AskSums,
    Began,
    Counted,
    Ended,
    GiveUp,
    Serving,
    Stop,
    Sums,
    ToFront,
    ValidKeys,
    decode_to_front,
)
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import LinkedEngine
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, ProtocolError
from gpuscore.processes.worker.link import TICK, ChildListener, EngineLink
from gpuscore.processes.worker.process import Patience
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.http.timing import Listener
from gpuscore.server.observe.operations import Operations
from gpuscore.server.observe.sums import Samples, Snapshot
from gpuscore.server.run import FrontShare, serve
from gpuscore.server.stopping import DrainingServer
from gpuscore.types.stats import EngineStats

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

logger = logging.getLogger(__name__)

REPORT = 1.0  # seconds between two reports of what was counted
ASK = 2.0  # seconds to wait for what the others have counted
WARM = 1.0  # seconds to wait for an engine that was ready, before connections are accepted
EXIT_ENGINE, EXIT_CONFIG = 70, 78  # as in `gpuscore.commands.cli`; the parent prints the error


@dataclass(frozen=True, slots=True)
class Seat:
    """A front's place: its number, its sockets, and what the parent knows of the engines."""

    number: int
    listener: socket.socket
    control: socket.socket
    about: tuple[str, ...]
    warm: bool


@dataclass(frozen=True, slots=True)
class FrontApp:
    """A server's own parts, the same in all fronts; `serve` explains most of them.

    Args:
        models: the served models, not loaded yet, since each front has its own copy; each with a
            function that prepares it for the engines' clients.
        devices: of each model's engines.
        ready_lines: returns what the parent prints when the server is ready, given its address.
    """

    models: Sequence[tuple[ServedModel, Callable[[Replicas], LoadedModel]]]
    devices: Sequence[str]
    config: ServerConfig
    engine: EngineConfig
    keys: ApiKeys
    tracer: "Callable[[], SpanTracer | None]" = lambda: None
    ready_lines: Callable[[str], str] = str


def run_front(app: FrontApp, board: Board, addresses: Sequence[str], seat: Seat) -> int:
    """Serve until the parent's second `Stop` or the end of the drain; return the exit code.

    Args:
        app: the server.
        board: the memory shared with the other fronts.
        addresses: of the engines' listeners, model by model.
        seat: this front's place.
    """
    per_key = -(-app.config.max_inflight_per_key // board.fronts)  # the other limits count together
    config = replace(app.config, max_inflight_per_key=per_key)
    control = Control(app, seat)
    links: list[FrontLink] = []

    def connect(index: int, owner: ChildListener) -> FrontLink:
        wait = partial(board.retry_after, index)
        links.append(FrontLink(addresses[index], seat.about[index], owner, wait))
        return links[-1]

    def linked(number: int) -> Replicas:
        engines: list[LinkedEngine[FrontLink]] = []
        for _ in app.devices:
            index = len(links)
            counts = board.backlog(seat.number, index)
            engines.append(LinkedEngine(app.engine, partial(connect, index), counts, engines))
        whole = board.whole_backlog(seat.number, number)
        return Replicas(engines, app.devices, app.engine, whole)

    models = [
        (served, partial(load, linked(number))) for number, (served, load) in enumerate(app.models)
    ]
    share = FrontShare(
        fronts=board.fronts,
        listener=Listener(fileno=seat.listener.detach()),
        counts=board.gate(seat.number),
        others=control.others,
        patience=WARM if seat.warm else 0.0,
        begun=partial(control.begin, links),
        has_metrics_port=seat.number == 0,  # it asks the others for their counts
    )
    try:
        code = serve(models, config, app.keys, control.serving, app.tracer(), share)
    except EngineFailed:
        code = EXIT_ENGINE
    except ConfigError as error:
        control.end(EXIT_CONFIG, str(error))
        return EXIT_CONFIG
    control.end(code)
    return code


class FrontLink(EngineLink):
    """The link of a front, which connects to an engine's listener.

    The engine's supervisor, in another process, notices if the engine is lost or hangs, and ends
    it. This link only tells its owner that the engine is silent or lost.

    Args:
        address: of the `EngineListener`.
        about: the supervised child's description of its model.
        owner: receives the engine's events.
        retry_after: returns whole seconds until a lost engine may be ready.
    """

    alone = False  # it serves other fronts, too

    def __init__(
        self, address: str, about: str, owner: ChildListener, retry_after: Callable[[], int]
    ) -> None:
        super().__init__(owner, Patience(), "link")
        self.planned.set_result(about)
        self._address, self._retry_after = address, retry_after
        self._told: EngineStats | None = None  # by the supervisor

    def fail(self, error: Exception) -> None:
        """Note that the engine has failed for good."""
        self.finish(error, error)

    def tell(self, stats: EngineStats) -> None:
        """Note the supervisor's statistics, whose counters add up all the engine's processes."""
        self._told = stats

    @property
    def stats(self) -> EngineStats:
        """The supervisor's last statistics, or else the last heartbeat's."""
        return super().stats if self._told is None else self._told

    @property
    def retry_after(self) -> int:
        return self._retry_after()

    def keep_running(self) -> None:
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
        try:
            self._watch(FrameReader(sock), writer)
        finally:
            self._lost()
            writer.hang_up()


class Control:
    """A front's end of the control socket, with the thread that follows the parent's commands."""

    def __init__(self, app: FrontApp, seat: Seat) -> None:
        self._sock = seat.control
        self._writer = FrameWriter(seat.control, "control-writer")
        self._reader = FrameReader(seat.control)
        self._keys, self._ready_lines = app.keys, app.ready_lines
        self._asked: dict[int, Future[Sums]] = {}
        self._numbers = count()
        self._links: list[FrontLink] = []
        self._server: DrainingServer | None = None  # until `begin`
        self._operations: Operations | None = None
        self._writer.send(Began(os.getpid()))
        self._unread: list[bytes] = []
        while not self._unread:  # the keys, before anybody can use old ones
            self._unread = self._reader.read()
        self._follow(decode_to_front(self._unread.pop(0)))

    def begin(self, links: list[FrontLink], server: DrainingServer, operations: Operations) -> None:
        """Follow the parent's commands from now on, in a thread."""
        self._links, self._server, self._operations = links, server, operations
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def serving(self, address: str) -> None:
        """Report that this front can score."""
        self._writer.send(Serving(self._ready_lines(address)))

    def end(self, code: int, refusal: str | None = None) -> None:
        """Report the last counts, and the end of this front."""
        self._report()
        self._writer.send(Ended(code, refusal))
        self._writer.close()

    def others(self, own: Snapshot) -> Samples:
        """Return the sum of the other fronts' metrics, and note the engines' statistics.

        Raises:
            Unavailable: the parent has not answered in time.
        """
        number, answer = next(self._numbers), Future[Sums]()
        self._asked[number] = answer
        self._writer.send(AskSums(number, own))
        try:
            sums = answer.result(ASK)
        except TimeoutError:
            raise Unavailable("the other fronts' metrics are late", retry_after=1) from None
        finally:
            del self._asked[number]
        for link, stats in zip(self._links, sums.engines, strict=True):
            link.tell(stats)
        return sums.samples

    def _run(self) -> None:
        due = monotonic() + REPORT
        for frame in self._unread:
            self._follow(decode_to_front(frame))
        while True:
            try:
                waiting = self._reader.wait(max(0.0, due - monotonic()))
                frames = self._reader.read() if waiting else []
            except (EOFError, OSError):
                os._exit(EXIT_ENGINE)  # the parent is gone
            for frame in frames:
                self._follow(decode_to_front(frame))
            if monotonic() >= due:
                due = monotonic() + REPORT
                self._report()

    def _follow(self, message: ToFront) -> None:
        match message:
            case Stop():
                assert self._server is not None  # noqa: S101  (`begin` starts the thread)
                self._server.handle_exit(message.signal, None)
            case ValidKeys():
                self._keys.replace(ApiKeys.of_digests(message.digests))
            case GiveUp():
                for link in self._links:
                    link.fail(EngineFailed(message.reason))
            case AskCounts():
                self._report(message.number)
            case Sums():
                if answer := self._asked.get(message.number):
                    answer.set_result(message)

    def _report(self, number: int | None = None) -> None:
        if self._operations is not None:
            self._writer.send(Counted(self._operations.metrics.snapshot(), number))
