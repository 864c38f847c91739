"""The messages between the server and the engine's process: structs of msgspec, as MessagePack.

A request and its result are `ScoreRequest` and `ScoreResult` themselves, whose arrays are sent as
raw little-endian bytes. Neither side trusts the other: decoding checks the types, `check_request`
and `check_result` check sizes and values.

`gpuscore.ray` uses them, too.
"""

from collections.abc import Callable
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
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
MessageT = TypeVar("MessageT")

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
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
        return cls(id, error.code, error.message, error.param, error.retry_after)

    def error(self) -> GpuscoreError:
        """Return the error; raise ProtocolError if its code is unknown."""
        if self.code not in _ERRORS:
            raise ProtocolError("an unknown error code")
        return _ERRORS[self.code](self.message, param=self.param, retry_after=self.retry_after)


class Heartbeat(Message, frozen=True):
    """The child's stats, which it sends several times a second."""

    stats: EngineStats
    stalled: Seconds  # since the engine last made progress; 0 while it has no work


ToChild: TypeAlias = Score | Cancel  # after Start
FromChild: TypeAlias = Ready | Refused | Result | Failure | Heartbeat


def encode(message: Message) -> bytes:
    """Return a message as MessagePack, with the arrays of a request or result as bytes."""
    if isinstance(message, Score | Result):
        content = message.request if isinstance(message, Score) else message.result
        fields = [*map(_sent, structs.astuple(content))]
        return _encoder.encode((type(message).__name__, message.id, fields))
    return _encoder.encode(message)


def decoder(kind: type[MessageT] | UnionType) -> Callable[[bytes], MessageT]:
    """Return a function that decodes messages of a kind, a class or a union of them.

    It raises ProtocolError if a frame is no such message.
    """
    made: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind, dec_hook=_received)

    def decode(frame: bytes) -> MessageT:
        try:
            return made.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a malformed message: {error}") from error

    return decode


def _sent(value: Any) -> Any:
    """Return a field as it is sent: an array as bytes, a table with its width, rows of arrays
    joined with their lengths, and one array that all rows share once, with their number."""
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
    """Return a field of a kind, an array or rows of them, made from what `_sent` has returned."""
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
    """Return the request; raise ProtocolError if sizes disagree or the model lacks an id."""
    items = request.item_ids
    if not items or len(items) != len(request.label_ids):
        raise ProtocolError(f"{len(request.label_ids)} label lists for {len(items)} items")
    labels = {id(ids): ids for ids in request.label_ids}.values()  # often one for all items
    if not (all(map(len, items)) and all(map(len, labels))):
        raise ProtocolError("an item without tokens or labels")
    sequences = () if request.trie is None else request.trie.sequences
    if any(not 0 <= id < limits.vocab_rows for ids in sequences for id in ids):
        raise ProtocolError(f"a label's token id outside 0 to {limits.vocab_rows - 1}")
    of_query = () if request.query_labels is None else (request.query_labels,)
    tokens, rows_of_labels = (request.query_ids, *items), (*of_query, *labels)
    for arrays, rows in (tokens, limits.vocab_rows), (rows_of_labels, limits.label_rows):
        ids = np.concatenate(arrays)
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
