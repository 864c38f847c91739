"""The messages between the server and the engine's process, encoded as MessagePack.

Arrays are raw little-endian bytes. Neither side trusts the other: decoding checks the types,
`to_request` and `to_result` check sizes and values.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import GpuscoreError, InternalError
from gpuscore.processes.worker.frames import Message, ProtocolError, decoded
from gpuscore.system.log import LogFormat
from gpuscore.types.batch import BackendLimits, Float32Array, Int32Array
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult, Timings
from gpuscore.types.stats import EngineStats

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
ArrayT = TypeVar("ArrayT", bound=np.generic)

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class Start(Message, frozen=True):
    """The first message to the child: the model to load and the engine's settings."""

    directory: str
    model: ModelConfig
    engine: EngineConfig
    cores: tuple[Natural, ...] = ()  # CPU cores that the child may use; empty: all
    log_format: LogFormat = "json"


class Score(Message, frozen=True):
    """A request to the child. A single label count means that all items have the same labels."""

    id: Natural
    query: bytes  # int32 [cut]
    items: bytes  # int32, all items concatenated
    item_counts: bytes  # int32 [N]
    labels: bytes  # int32
    label_counts: bytes  # int32 [N] or [1]
    need_lse: bool
    num_top: Natural
    priority: int
    salt: str
    deadline: float | None  # on the monotonic clock, which all processes of a machine share
    every_position: bool
    query_labels: bytes | None  # int32 [cut]
    sequences: tuple[tuple[Natural, ...], ...] | None  # of labels of several tokens


class Cancel(Message, frozen=True):
    """Cancellation of a request; the child sends no answer to it."""

    id: Natural


class Close(Message, frozen=True):
    """Command to the child to end after the present step."""


class Planned(Message, frozen=True):
    """The child's first message: the model can be served; `about` describes it.

    `dtype` is the number format that every later child and the other replicas start with.
    """

    about: str
    dtype: str


class Loading(Message, frozen=True):
    """The child's account, a few times a second, of the weights that it has read."""

    done: Natural  # bytes
    total: Natural


class Ready(Message, frozen=True):
    """The child's message, sent once, that the model is loaded and warmed up."""

    limits: BackendLimits


class Refused(Message, frozen=True):
    """The child's last message if the model cannot be served (ConfigError)."""

    message: str


class Result(Message, frozen=True):
    """A request's answer from the child, with the sizes that the request asked for."""

    id: Natural
    label_logits: bytes  # float32, all items concatenated
    lse: bytes | None  # float32 [rows]
    top_ids: bytes | None  # int32 [rows, num_top]
    top_logits: bytes | None  # float32 [rows, num_top]
    computed_tokens: Natural
    timings: Timings


class Failure(Message, frozen=True):
    """A request's error from the child."""

    id: Natural
    code: str
    message: str
    param: str | None
    retry_after: int | None


class Heartbeat(Message, frozen=True):
    """The child's stats, which it sends several times a second."""

    stats: EngineStats
    stalled: Seconds  # since the engine last made progress; 0 while it has no work


ToChild: TypeAlias = Start | Score | Cancel | Close
FromChild: TypeAlias = Planned | Loading | Ready | Refused | Result | Failure | Heartbeat

_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
_from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
# They raise ProtocolError if a frame is no message to the child, or from it.
decode_to_child, decode_from_child = partial(decoded, _to_child), partial(decoded, _from_child)
_ERRORS = {kind.code: kind for kind in GpuscoreError.__subclasses__()}


def score_message(id: int, request: ScoreRequest) -> Score:
    rows = request.label_ids
    rows = rows[:1] if all(row is rows[0] for row in rows) else rows
    return Score(
        id,
        _int_bytes(request.query_ids),
        _int_bytes(_joined(request.item_ids)),
        _counts(request.item_ids),
        _int_bytes(_joined(rows)),
        _counts(rows),
        request.need_lse,
        request.num_top,
        request.priority,
        request.salt,
        request.deadline,
        request.every_position,
        None if request.query_labels is None else _int_bytes(request.query_labels),
        None if request.trie is None else request.trie.sequences,
    )


def to_request(message: Score, vocab_rows: int, label_rows: int) -> ScoreRequest:
    """Return the request; raise ProtocolError if sizes disagree or the model lacks an id."""
    query, items = _array(message.query, _INT32), _array(message.items, _INT32)
    labels, of_query = (_array(x or b"", _INT32) for x in (message.labels, message.query_labels))
    if any(id >= vocab_rows for ids in message.sequences or () for id in ids):
        raise ProtocolError(f"a label's token id outside 0 to {vocab_rows - 1}")
    of_rows = [(x, label_rows) for x in (labels, of_query)]
    for ids, rows in [(query, vocab_rows), (items, vocab_rows), *of_rows]:
        if ids.size and ids.view(np.uint32).max() >= rows:  # negative ids become large ones
            raise ProtocolError(f"a token id or label outside 0 to {rows - 1}")
    item_ids = _split(items, _array(message.item_counts, _INT32))
    label_ids = _split(labels, _array(message.label_counts, _INT32))
    if len(label_ids) == 1:
        label_ids *= len(item_ids)
    if len(label_ids) != len(item_ids):
        raise ProtocolError(f"{len(label_ids)} label lists for {len(item_ids)} items")
    try:
        scored = None if message.query_labels is None else of_query
        trie = None if message.sequences is None else LabelTrie(message.sequences)
        asked = message.need_lse, message.num_top, message.priority, message.salt, message.deadline
        every = message.every_position
        return ScoreRequest(
            query, item_ids, label_ids, *asked, every, query_labels=scored, trie=trie
        )
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def result_message(id: int, result: ScoreResult) -> Result:
    return Result(
        id,
        _float_bytes(_joined(result.label_logits)),
        None if result.lse is None else _float_bytes(result.lse),
        None if result.top_ids is None else _int_bytes(result.top_ids),
        None if result.top_logits is None else _float_bytes(result.top_logits),
        result.computed_tokens,
        result.timings,
    )


def to_result(message: Result, request: ScoreRequest) -> ScoreResult:
    """Return the result; raise ProtocolError unless it is finite and fits this request."""
    count = request.num_rows
    logits = _array(message.label_logits, _FLOAT32)
    lse = None if message.lse is None else _array(message.lse, _FLOAT32)
    top_ids = None if message.top_ids is None else _array(message.top_ids, _INT32)
    top_logits = None if message.top_logits is None else _array(message.top_logits, _FLOAT32)
    asked = (request.need_lse, request.num_top > 0, request.num_top > 0)
    if tuple(part is not None for part in (lse, top_ids, top_logits)) != asked:
        raise ProtocolError("a result without the parts that its request asked for")
    sizes = ((lse, count), *((part, count * request.num_top) for part in (top_ids, top_logits)))
    if any(part is not None and len(part) != size for part, size in sizes):
        raise ProtocolError(f"a result whose arrays do not have {count} rows")
    if not all(part is None or np.isfinite(part).all() for part in (logits, lse, top_logits)):
        raise ProtocolError("a result with numbers that are not finite")
    rows = _rows(logits, request.row_labels)
    if top_ids is not None and top_logits is not None:
        top_ids, top_logits = top_ids.reshape(count, -1), top_logits.reshape(count, -1)
    return ScoreResult(rows, lse, top_ids, top_logits, message.computed_tokens, message.timings)


def failure_message(id: int, error: BaseException) -> Failure:
    if not isinstance(error, GpuscoreError):
        error = InternalError("the engine failed")
    return Failure(id, error.code, error.message, error.param, error.retry_after)


def to_error(message: Failure) -> GpuscoreError:
    if message.code not in _ERRORS:
        raise ProtocolError("an unknown error code")
    kind = _ERRORS[message.code]
    return kind(message.message, param=message.param, retry_after=message.retry_after)


def _int_bytes(values: Int32Array) -> bytes:
    return values.astype(_INT32, copy=False).tobytes()


def _float_bytes(values: Float32Array) -> bytes:
    return values.astype(_FLOAT32, copy=False).tobytes()


def _joined(parts: Sequence[NDArray[ArrayT]]) -> NDArray[ArrayT]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _counts(parts: Sequence[NDArray[Any]]) -> bytes:
    return np.fromiter(map(len, parts), _INT32, len(parts)).tobytes()


def _array(data: bytes, dtype: "np.dtype[ArrayT]") -> NDArray[ArrayT]:
    if len(data) % dtype.itemsize:
        raise ProtocolError(f"{len(data)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _rows(
    logits: NDArray[np.float32], label_ids: tuple[Int32Array, ...]
) -> tuple[NDArray[np.float32], ...]:
    """Split the logits into one array per item; fast if all items have the same labels."""
    count, first = len(label_ids), label_ids[0]
    if all(ids is first for ids in label_ids) and len(logits) == count * len(first):
        return tuple(logits.reshape(count, len(first)))
    return _split(logits, np.fromiter(map(len, label_ids), np.int32, count), 0)


def _split(
    values: NDArray[ArrayT], counts: Int32Array, least: int = 1
) -> tuple[NDArray[ArrayT], ...]:
    """Split values into pieces of these lengths: at least one piece, each of at least `least`."""
    if not len(counts) or counts.min() < least or counts.sum(dtype=np.int64) != len(values):
        raise ProtocolError(f"{len(counts)} lengths that do not add up to {len(values)} numbers")
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return tuple(values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))
