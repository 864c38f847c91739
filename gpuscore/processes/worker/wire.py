"""The messages between the server and the engine process, structs of msgspec as MessagePack, and
one end of the connection that sends them.

A request and its result are `ScoreRequest` and `ScoreResult` themselves, whose arrays are sent as
raw little-endian bytes. Neither side trusts the other: decoding checks the types, `check_request`
and `check_result` check sizes and values. `gpuscore.ray` uses them, too.

A frame of the pipe is a length of four little-endian bytes, then a message's bytes.
"""

import logging
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, structs
from numpy.typing import NDArray

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import GpuscoreError, InternalError
from gpuscore.types.batch import BackendLimits, Float32Rows, Int32Array, Int32Rows
from gpuscore.types.request import Readouts, ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
MessageT = TypeVar("MessageT")

logger = logging.getLogger(__name__)

MAX_FRAME = 2**30  # bytes; the largest request and result of the default limits take about 10 MiB
_HEAD = struct.Struct("<I")
_PIECE = 2**20
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_encoder = msgspec.msgpack.Encoder()
_ERRORS = {kind.code: kind for kind in GpuscoreError.__subclasses__()}


class ProtocolError(Exception):
    """The other side sent data that is not a valid message."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The base of all messages; the tag is the class's name."""


class Placement(msgspec.Struct, frozen=True):
    """The place of one engine.

    Attributes:
        device: its name in `--devices`, in metrics and in the log.
        model: the settings, for this device.
        environment: variables that the child gets besides the server's.
        cores: the CPU cores that it may use; empty for all of them.
    """

    device: str
    model: ModelConfig
    environment: dict[str, str] = {}
    cores: tuple[Natural, ...] = ()


class Start(Message, frozen=True):
    """The first message to the child: the model to load, where, and the engine's settings."""

    directory: str
    place: Placement
    engine: EngineConfig


class Score(Message, frozen=True):
    """A request to the child. All processes of a machine share the clock of its deadline."""

    id: Natural
    request: ScoreRequest


class Cancel(Message, frozen=True):
    """Cancellation of a request; the child sends no answer to it."""

    id: Natural


class Ready(Message, frozen=True):
    """The child's message, sent once, that the model is loaded and warmed up."""

    limits: BackendLimits
    about: str  # the model, for people


class Refused(Message, frozen=True):
    """The child's last message if the model cannot be served (ConfigError)."""

    message: str


class Result(Message, frozen=True):
    """A request's answer from the child."""

    id: Natural
    result: ScoreResult


class Failure(Message, frozen=True):
    """A request's error from the child."""

    id: Natural
    code: str
    message: str
    param: str | None
    retry_after: int | None

    @classmethod
    def of(cls, id: int, error: BaseException) -> "Failure":
        if not isinstance(error, GpuscoreError):
            error = InternalError("the engine failed")
        return cls(id, error.code, error.message, param=error.param, retry_after=error.retry_after)

    def error(self) -> GpuscoreError:
        """Return the error; raise ProtocolError if its code is unknown."""
        if self.code not in _ERRORS:
            raise ProtocolError("an unknown error code")
        return _ERRORS[self.code](self.message, param=self.param, retry_after=self.retry_after)


class Heartbeat(Message, frozen=True):
    """The child's stats, several times a second, and for how many seconds the engine has made no
    progress with its work."""

    stats: EngineStats
    stalled: Annotated[float, Meta(ge=0)]


ToChild: TypeAlias = Score | Cancel  # after Start
FromChild: TypeAlias = Ready | Refused | Result | Failure | Heartbeat


def encode(message: Message) -> bytes:
    """Return a message as MessagePack, with the arrays of a request or result as bytes."""
    if isinstance(message, Score | Result):
        content = message.request if isinstance(message, Score) else message.result
        return _encoder.encode((type(message).__name__, message.id, _fields(content)))
    return _encoder.encode(message)


def decoder(kind: type[MessageT] | UnionType) -> Callable[[bytes], MessageT]:
    """Return a function that decodes messages of a kind, a class or a union of them.

    It raises ProtocolError if a frame is no such message.
    """
    typed: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind, dec_hook=_received)

    def decode(frame: bytes) -> MessageT:
        try:
            return typed.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a malformed message: {error}") from error

    return decode


def _fields(content: msgspec.Struct) -> list[Any]:
    return [*map(_sent, structs.astuple(content))]


def _sent(value: Any) -> Any:
    """Return a field as it is sent: an array as bytes; a table with its width; several arrays
    joined, with their lengths; several references to one array as this array and their number."""
    if isinstance(value, Readouts):
        return _fields(value)
    if isinstance(value, np.ndarray):
        if value.dtype.char not in "if":
            raise TypeError(f"an array of {value.dtype}, not of 32-bit numbers")
        return value.tobytes() if value.ndim == 1 else (value.tobytes(), value.shape[1])
    if not isinstance(value, tuple) or not value:
        return value
    first = value[0]
    if all(row is first for row in value):
        return _sent(first), len(value)
    return _sent(np.concatenate(value)), [*map(len, value)]


def _received(kind: Any, value: Any) -> Any:
    """Return a field of a kind, an array or several, from what `_sent` has returned."""
    if kind is Int32Rows or kind is Float32Rows:
        data, lengths = value
        values: NDArray[Any] = np.frombuffer(data, _INT32 if kind is Int32Rows else _FLOAT32)
        if isinstance(lengths, int):
            return kind((values,) * lengths)
        if (least := min(lengths)) < 0 or sum(lengths) != len(values):
            raise ValueError(f"{len(lengths)} lengths that do not add up to {len(values)} numbers")
        if least == max(lengths):  # as of most results: twice as fast as slices
            return kind(values.reshape(len(lengths), least))
        ends = [*accumulate(lengths, initial=0)]
        return kind([values[start:end] for start, end in pairwise(ends)])
    data, width = value if isinstance(value, list) else (value, None)
    array: NDArray[Any] = np.frombuffer(data, _INT32 if kind == Int32Array else _FLOAT32)
    return array if width is None else array.reshape(-1, width)


def check_request(request: ScoreRequest, limits: BackendLimits) -> ScoreRequest:
    """Return the request; raise ProtocolError if sizes disagree or the model has no such id."""
    items = request.item_ids
    if not items or len(items) != len(request.label_ids):
        raise ProtocolError(f"{len(request.label_ids)} label lists for {len(items)} items")
    labels = {id(ids): ids for ids in request.row_labels}.values()  # often one for all items
    scored = request.readouts is not None or all(map(len, labels))
    if not (scored and all(map(len, items))):
        raise ProtocolError("an item without tokens or labels")
    sequences = () if request.trie is None else request.trie.sequences
    if any(not 0 <= id < limits.vocab_rows for ids in sequences for id in ids):
        raise ProtocolError(f"a label's token id outside 0 to {limits.vocab_rows - 1}")
    tokens = (request.query_ids, *items)
    for arrays, rows in (tokens, limits.vocab_rows), (labels, limits.label_rows):
        ids = np.concatenate([*arrays])
        if ids.size and ids.view(np.uint32).max() >= rows:  # negative ids become large ones
            raise ProtocolError(f"a token id or label outside 0 to {rows - 1}")
    return request


def check_result(result: ScoreResult, request: ScoreRequest) -> ScoreResult:
    """Return the result; raise ProtocolError unless it fits this request."""
    if [*map(len, result.label_logits)] != [*map(len, request.row_labels)]:
        raise ProtocolError("a result whose logits are not its request's labels")
    lse = (request.num_rows,) if request.need_lse else None
    top = (request.num_rows, request.num_top) if request.num_top else None
    parts = (result.lse, result.top_ids, result.top_logits)
    if tuple(None if part is None else part.shape for part in parts) != (lse, top, top):
        raise ProtocolError("a result without the parts that its request asked for")
    return result


class Pipe:
    """A connection over a stream socket. One thread reads, and sends what all threads put.

    So `put` waits neither for a full pipe nor for the encoding of a large message.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._woken, self._waker = socket.socketpair()
        for end in (sock, self._woken, self._waker):
            end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._queue: deque[Callable[[], bytes]] = deque()
        self._sending = threading.Lock()  # held by the thread that takes messages from the queue
        self._out = bytearray()  # of messages that are sent in part
        # One buffer for all receives: a new block for each, cut to its content, would leave gaps in
        # the heap that are too small for the next batch.
        self._received = memoryview(bytearray(_PIECE))
        self._in = bytearray()

    @property
    def idle(self) -> bool:
        """True if all that was put is sent."""
        return not (self._queue or self._out or self._sending.locked())

    def put(self, *messages: Callable[[], bytes], now: bool = False) -> None:
        """Queue messages, to be sent in this order; never blocks.

        Args:
            messages: functions, each of which encodes one message.
            now: if nothing else is to be sent, encode and send them in the caller's thread, as far
                as the pipe has room. This is faster than waking the reading thread. But that thread
                sends waiting messages together, so `now` is only for a request that is alone.
        """
        now = now and self.idle
        self._queue.extend(messages)
        if now and self._sending.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._sending.release()
        if not self.idle:
            with suppress(OSError):  # it was woken already, or is closed
                self._waker.send(b"\0")

    def read(self, seconds: float | None = None) -> list[bytes]:
        """Send what is queued and receive once; return the complete frames.

        Args:
            seconds: the longest wait for data or for messages to send; None: no limit.

        Raises:
            EOFError: the other side has closed or is gone.
            ProtocolError: a frame's length is over MAX_FRAME.
        """
        self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        ready = dict(self._poll.poll(None if seconds is None else seconds * 1000))
        if ready.pop(self._woken.fileno(), None):
            self._woken.recv(_PIECE)
        if not self.idle:
            with self._sending:
                self._send()
        received = ready.get(self._sock.fileno(), 0) & ~select.POLLOUT
        return self._receive() if received else []

    def close(self) -> None:
        """Close the sockets; what is queued is not sent."""
        with self._sending:
            for end in (self._sock, self._woken, self._waker):
                end.close()

    def _receive(self) -> list[bytes]:
        try:
            size = self._sock.recv_into(self._received)
        except ConnectionError:
            size = 0
        if not size:
            raise EOFError
        self._in += self._received[:size]
        frames = []
        start = 0
        while len(self._in) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._in, start)
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes, the limit is {MAX_FRAME}")
            end = start + _HEAD.size + size
            if end > len(self._in):
                break
            frames.append(bytes(memoryview(self._in)[start + _HEAD.size : end]))
            start = end
        del self._in[:start]
        return frames

    def _send(self) -> None:
        """Send small messages in one system call, because each call wakes the other process."""
        try:
            while self._queue or self._out:
                while self._queue and len(self._out) < _PIECE:
                    frame = self._queue.popleft()()
                    self._out += _HEAD.pack(len(frame))
                    self._out += frame
                if self._out:
                    del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass  # `read` goes on when there is room
        except OSError:  # the other side is gone, which `read` will report
            self._queue.clear()
            self._out.clear()
        except Exception:
            logger.exception("a message could not be sent")
            # Both sides see the end and give up, instead of waiting for the lost message.
            self._sock.shutdown(socket.SHUT_RDWR)
