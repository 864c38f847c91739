"""The process that forks the fronts.

It has read the model's files and has one thread, which makes a fork safe. So a front starts within
some hundredths of a second, and the fronts share the memory of what was there before.
"""

import gc
import logging
import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeAlias

import msgspec

from gpuscore.errors import ConfigError, EngineFailed
from gpuscore.processes.fronts.front import Seat
from gpuscore.processes.worker.process import die_with

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
_MOST = 2**20  # bytes of a message
_DESCRIPTORS = 2  # of a new front: its listener and its control socket

FrontMain: TypeAlias = Callable[[Seat], int]
Prepare: TypeAlias = Callable[[str], FrontMain]  # gets the text given to `Forker.prepare`


class _Order(msgspec.Struct, frozen=True):
    """An order to the forking process: prepare with `text`, or fork the front of a seat."""

    text: str = ""
    seat: int | None = None
    about: tuple[str, ...] = ()
    warm: bool = False


class Forker:
    """The parent's side of the process that forks fronts.

    Make a Forker in the main thread, before other threads exist: it forks this process.

    Args:
        prepare: called in the forking process, by `Forker.prepare`. It returns a function, which
            each front calls, and which returns the front's exit code.
    """

    def __init__(self, prepare: Prepare) -> None:
        parent = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _run(prepare, theirs, parent)
        theirs.close()

    def prepare(self, text: str) -> None:
        """Prepare the data that all fronts share; raise ConfigError if it is refused."""
        self._send(_Order(text=text))

    def prepared(self) -> None:
        """Wait until `prepare` is done.

        Raises:
            ConfigError: `prepare` raised this.
            EngineFailed: the process has ended.
        """
        answer = self._socket.recv(_MOST)
        if not answer:
            raise EngineFailed("the process that forks HTTP workers was lost")
        if refusal := msgspec.msgpack.decode(answer, type=str):
            raise ConfigError(refusal)

    def fork(
        self, seat: int, about: tuple[str, ...], warm: bool, listener: socket.socket
    ) -> socket.socket:
        """Start the front of a seat; return the socket that controls it.

        Args:
            seat: its number.
            about: the description of each engine's model.
            warm: the engine was ready, so the front waits for it before it accepts connections.
            listener: listens on the server's port.

        Raises:
            EngineFailed: the process has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            order = _Order(seat=seat, about=about, warm=warm)
            self._send(order, [listener.fileno(), theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the process and all fronts that are left."""
        self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _send(self, order: _Order, descriptors: "list[int] | None" = None) -> None:
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(order)], descriptors or [])
        except OSError as error:
            raise EngineFailed("the process that forks HTTP workers was lost") from error


def _run(prepare: Prepare, sock: socket.socket, parent: int) -> NoReturn:
    """Run the forking process."""
    try:
        die_with(parent)
        # A terminal, or a service manager, signals all processes; only the parent acts on it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # fronts report their exit codes themselves
        _fork_fronts(prepare, sock)
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
    os._exit(EXIT_FAILED)


def _fork_fronts(prepare: Prepare, sock: socket.socket) -> None:
    main: FrontMain | None = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(sock, _MOST, _DESCRIPTORS)
        if not message:
            return  # the parent has ended
        order = msgspec.msgpack.decode(message, type=_Order)
        if order.seat is None:
            main, refusal = _prepared(prepare, order.text)
            gc.collect()
            gc.freeze()  # a garbage collection in a front would copy the memory
            sock.send(msgspec.msgpack.encode(refusal))
            continue
        assert main is not None  # noqa: S101  (the parent waits until all is prepared)
        if (pid := os.fork()) == 0:
            sock.close()
            _run_front(main, order, descriptors)
        logger.debug("front %d is process %d", order.seat, pid)
        for descriptor in descriptors:
            os.close(descriptor)


def _prepared(prepare: Prepare, text: str) -> tuple[FrontMain | None, str]:
    try:
        return prepare(text), ""
    except ConfigError as error:
        return None, str(error)


def _run_front(main: FrontMain, order: _Order, descriptors: list[int]) -> NoReturn:
    code = EXIT_FAILED
    try:
        die_with(os.getppid())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener, control = (socket.socket(fileno=number) for number in descriptors)
        assert order.seat is not None  # noqa: S101
        code = main(Seat(order.seat, listener, control, order.about, order.warm))
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
    os._exit(code)
