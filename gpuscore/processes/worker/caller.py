"""The requests of one connection to the engine's process, and the connections of the fronts."""

import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import sleep

from gpuscore.engine.engine import Engine
from gpuscore.errors import GpuscoreError
from gpuscore.processes.worker.frames import FrameReader, FrameWriter, Make, ProtocolError
from gpuscore.processes.worker.messages import (
    Cancel,
    Failure,
    Message,
    Ready,
    Result,
    Score,
    ToChild,
    decode_to_child,
    encode,
    failure_message,
    result_message,
    to_request,
)
from gpuscore.types.request import ScoreRequest, ScoreResult

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # process, user, group: <sys/socket.h>, struct ucred
_PAUSE = 0.1  # seconds after a connection that could not be accepted


def messages_of(reader: FrameReader) -> Iterator[list[ToChild]]:
    """Yield the messages of each receive together."""
    while True:
        if frames := reader.read():
            yield [decode_to_child(frame) for frame in frames]


class Caller:
    """The requests of one connection. Their ids are the connection's own."""

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

    def send(self, message: Message) -> None:
        self._writer.put(lambda: encode(message))

    def send_if_idle(self, message: Message) -> None:
        """Send a message unless answers are being sent, or the other side does not read."""
        if self._writer.idle:
            self.send(message)

    def send_answers(self) -> None:
        """Send all answers of a step at once, to wake the writer and the reader only once."""
        answers = []
        with suppress(IndexError):
            while True:  # until empty: the engine's thread and `_score` may both be here
                answers.append(self._answers.popleft())
        if answers:
            self._writer.put(*answers)

    def cancel_all(self) -> None:
        """Cancel all requests in flight."""
        for future in list(self._futures.values()):
            future.cancel()

    def _score(self, messages: list[Score]) -> None:
        limits = self._engine.limits
        requests: dict[int, ScoreRequest] = {}
        for message in messages:
            if message.id in self._futures or message.id in requests:
                raise ProtocolError(f"two requests in flight with the id {message.id}")
            try:
                request = to_request(message, limits.vocab_rows, limits.label_rows)
            except ProtocolError as error:
                logger.error("a malformed request: %s", error)
                self.send(failure_message(message.id, error))
            else:
                requests[message.id] = request
        outcomes = self._engine.score_all(list(requests.values()))
        for id, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, GpuscoreError):
                self.send(failure_message(id, outcome))
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
    return result_message(id, future.result()) if error is None else failure_message(id, error)


class Reception:
    """The callers of an engine: its supervisor, and the fronts that connect to its listener.

    Whatever a front sends ends its own connection at most.
    """

    def __init__(self, make_engine: Callable[[Callable[[], None]], Engine]) -> None:
        self._callers: tuple[Caller, ...] = ()
        self._lock = threading.Lock()
        self.engine = make_engine(self._send_answers)

    def add(self, writer: FrameWriter) -> Caller:
        """Return the caller of a new connection, which has got `Ready`."""
        caller = Caller(self.engine, writer)
        caller.send(Ready(self.engine.limits))
        with self._lock:
            self._callers = (*self._callers, caller)
        return caller

    def beat(self, message: Message) -> None:
        """Send a heartbeat to all callers that have time for it."""
        for caller in self._callers:
            caller.send_if_idle(message)

    def listen(self, listener: socket.socket) -> None:
        """Serve connections to a listening Unix socket until the process ends."""
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:  # such as no more descriptors
                logger.error("a connection to the engine was not accepted: %s", error)
                sleep(_PAUSE)
                continue
            if _user(sock) == os.geteuid():
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            else:
                logger.error("a connection of user %d to the engine was refused", _user(sock))
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        writer = FrameWriter(sock, "answers")
        caller = self.add(writer)
        try:
            for together in messages_of(FrameReader(sock)):
                caller.take(together)
        except (EOFError, OSError):
            pass  # the front has ended
        except ProtocolError as error:
            logger.error("a connection to the engine was closed: it sent %s", error)
        finally:
            with self._lock:
                self._callers = tuple(one for one in self._callers if one is not caller)
            caller.cancel_all()
            with suppress(OSError):  # the other end may be gone
                sock.shutdown(socket.SHUT_RDWR)  # wakes a writer that waits for a full socket
            writer.close()
            writer.join(1.0)
            sock.close()

    def _send_answers(self) -> None:
        for caller in self._callers:
            caller.send_answers()


def _user(sock: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel knows it."""
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(given)[1]
    return user
