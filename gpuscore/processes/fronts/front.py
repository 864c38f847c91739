"""A front: one of the server's HTTP processes, controlled by the parent."""

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
    Ended,
    GiveUp,
    Serving,
    Stop,
    Sums,
    ToFront,
    ValidKeys,
    counted,
    decode_to_front,
    listed,
    samples_of,
)
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.worker.client import LinkedEngine, Siblings
from gpuscore.processes.worker.frames import FrameReader, FrameWriter
from gpuscore.processes.worker.link import FrontLink
from gpuscore.processes.worker.messages import Message, encode
from gpuscore.processes.worker.patience import ChildListener
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.http.rounds import Listener
from gpuscore.server.observe.operations import Operations
from gpuscore.server.observe.sums import Samples, Snapshot
from gpuscore.server.run import DrainingServer, FrontShare, serve

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

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
class FrontModel:
    """A model that the fronts serve.

    Args:
        served: not loaded yet; each front has its own copy.
        devices: of its engines.
        load: prepares the model for the engines' clients.
    """

    served: ServedModel
    devices: tuple[str, ...]
    load: Callable[[Replicas], LoadedModel]


@dataclass(frozen=True, slots=True)
class FrontApp:
    """A server's own parts, the same in all fronts; `serve` explains most of them.

    Args:
        ready_lines: returns what the parent prints when the server is ready, given its address.
    """

    models: Sequence[FrontModel]
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
    each = -(-app.config.max_inflight_per_key // board.fronts)  # the other limits count together
    config = replace(app.config, max_inflight_per_key=each)
    control = Control(app, seat)
    links: list[FrontLink] = []

    def connect(index: int, owner: ChildListener) -> FrontLink:
        wait = partial(board.retry_after, index)
        links.append(FrontLink(addresses[index], seat.about[index], owner, wait))
        return links[-1]

    def linked(number: int, model: FrontModel) -> Replicas:
        engines: list[LinkedEngine[FrontLink]] = []
        siblings = Siblings(lambda: any(one.alive for one in engines), lambda: True)
        for _ in model.devices:
            index = len(links)
            counts = board.backlog(seat.number, index)
            engines.append(LinkedEngine(app.engine, partial(connect, index), counts, siblings))
        whole = board.whole_backlog(seat.number, number)
        return Replicas(engines, model.devices, app.engine, whole)

    models = [
        (one.served, partial(one.load, linked(number, one)))
        for number, one in enumerate(app.models)
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
        self._send(Began(os.getpid()))
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
        self._send(Serving(self._ready_lines(address)))

    def end(self, code: int, refusal: str | None = None) -> None:
        """Report what was counted last, and the end of this front."""
        self._report()
        self._send(Ended(code, refusal))
        self._writer.close()
        self._writer.join(1.0)

    def others(self, own: Snapshot) -> Samples:
        """Return the sum of the other fronts' metrics, and note the engines' statistics.

        Raises:
            Unavailable: the parent has not answered in time.
        """
        number, answer = next(self._numbers), Future[Sums]()
        self._asked[number] = answer
        self._send(AskSums(number, listed(own.growing), listed(own.present)))
        try:
            sums = answer.result(ASK)
        except TimeoutError:
            raise Unavailable("the other fronts' metrics are late", retry_after=1) from None
        finally:
            del self._asked[number]
        for link, stats in zip(self._links, sums.engines, strict=True):
            link.tell(stats)
        return samples_of(sums.samples)

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
            self._send(counted(self._operations.metrics.snapshot(), number))

    def _send(self, message: Message) -> None:
        self._writer.put(lambda: encode(message))
