"""The interface of a dialect: functions that read its bodies and write its answers.

Large answers are made in short pieces. A piece is made within about a millisecond, so a thread that
makes one delays no other for longer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import time
from typing import Annotated, Any, ClassVar, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec import Meta

from gpuscore.config import RequestLimits
from gpuscore.dialects.served import LoadedModel, ModelTable, ServedModel
from gpuscore.dialects.wire import (
    ErrorAnswer,
    FailedItem,
    PromptTokensDetails,
    ScoringBody,
    ShortUsage,
    about,
    encode_error,
)
from gpuscore.errors import GpuscoreError, InvalidRequest
from gpuscore.types.item_errors import ItemError, ItemErrors
from gpuscore.types.record import RequestRecord
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import scored_places

# Up to these sizes, preparing a request takes about a millisecond, so it is done on the event loop.
SMALL_ITEMS = 64
SMALL_TOKENS = 4096
SMALL_CHARS = 1024
LARGE = 1 << 18  # bytes of a body or of ids, or characters, from which a request counts as large


class ItemsBody(ScoringBody, kw_only=True):
    """The fields of bodies whose items may fail alone."""

    input: ClassVar[Any]  # no field: set by `read_as`
    on_error: Annotated[
        Annotated[str, Meta(pattern=r"^(fail|null)\Z")] | None,
        about(
            "What an item that cannot be scored does. `fail`: it fails the request. `null`: it "
            "gets no score and stands in `errors`, and the others are scored. Errors of the whole "
            "request are the same with both.",
            "fail",
        ),
    ] = None

    def refused(self) -> Iterator[tuple[int, InvalidRequest]]:
        """Yield the places and errors of items that cannot be read, by place.

        They are made one by one, because a body may have millions, far over every limit.
        """
        raise NotImplementedError

    def read_as(self, read: object) -> None:
        """Keep the items as the engine's request needs them, with an empty one in the place of each
        that cannot be read; raise InvalidRequest if one of these fails the request."""
        self.__dict__["input"] = read
        if self.on_error != "null":
            for _, error in self.refused():
                raise error

    def errors(self, model: LoadedModel, name: str, count: int) -> ItemErrors | None:
        """Return the errors of items that cannot be read; None if an error fails the request.

        Raises:
            TooManyItems: the number of items, which the caller calls `name`, is over the limit.
        """
        if self.on_error != "null":
            return None
        model.prompts.builder.check_count(name, count)
        errors = ItemErrors()
        for index, error in self.refused():
            errors.add(index, error)
        return errors


def nulls(
    values: Sequence[object], name: str, expected: str = "a text"
) -> Iterator[tuple[int, InvalidRequest]]:
    """Yield the place and the error of each null among a caller's values."""
    for index, value in enumerate(values):
        if value is None:
            param = f"{name}[{index}]"
            message = f"{param} is null; it must be {expected}"
            yield index, InvalidRequest(message, param=param)


class CheckedBody(Protocol):
    """The properties of every dialect's checked body."""

    @property
    def model(self) -> str | None: ...

    @property
    def num_items(self) -> int | None:
        """Number of items or documents; None if nothing is scored."""


BodyT = TypeVar("BodyT", bound=CheckedBody)


@dataclass(slots=True)
class PreparedBody(Generic[BodyT]):
    """A body with its request to the engine and, once it is there, the result.

    Args:
        body: the result of `decode`.
        request: the engine's request; None if the engine need not be asked.
        prompt_tokens: tokens of all prompts, for the usage; 0 if nothing is scored.
        notes: any other data that the dialect's `encode` needs.
        errors: the items that the request leaves out; None unless the body has `on_error: null`.
        parts: `request` divided into several, for a caller that can run them at once; else empty.
        places: the indices in the body of the items of each of `parts`.
        result: None if the engine was not asked, or was asked for `parts`.
        results: the results of `parts`, if the engine was asked for these.
        model: the served model, by the name that the caller used, or else its own.
        record: the request's record; it and `model` are set before `encode`.
    """

    body: BodyT
    request: ScoreRequest | None
    prompt_tokens: int = 0
    notes: Any = None
    errors: tuple[ItemError, ...] | None = None
    parts: tuple[ScoreRequest, ...] = ()
    places: Sequence[Sequence[int]] = ()
    result: ScoreResult | None = None
    results: Sequence[ScoreResult] = ()
    model: str = ""
    record: RequestRecord = field(init=False)

    @property
    def scored_places(self) -> Sequence[int]:
        """The indices in the body of the items of `request`."""
        return scored_places(self.errors, self.body.num_items)

    @classmethod
    def of(
        cls,
        body: BodyT,
        request: ScoreRequest | None,
        notes: Any = None,
        errors: ItemErrors | None = None,
    ) -> Self:
        """Return a body with the tokens of its request; the request is None without items."""
        tokens = 0 if request is None else request.num_prompt_tokens
        failed = None if errors is None else errors.listed()
        return cls(body, request, tokens, notes=notes, errors=failed)

    @property
    def engine_request(self) -> ScoreRequest:
        """The engine's request; it and `scores` raise ValueError if the engine was not asked."""
        if self.request is None:
            raise ValueError("the engine was not asked")
        return self.request

    @property
    def scores(self) -> ScoreResult:
        if self.result is None:
            raise ValueError("the engine was not asked")
        return self.result

    @property
    def failed_items(self) -> list[FailedItem] | None:
        """The items' errors as an answer shows them; None if the request did not ask for them."""
        if self.errors is None:
            return None
        return [FailedItem(error.index, error.code, error.message) for error in self.errors]

    def head(self, kind: str) -> tuple[str, str, int, str]:
        """Return the values of an `AnswerHead`."""
        return self.record.request_id, kind, int(time()), self.model

    @property
    def short_usage(self) -> ShortUsage:
        """The usage as rerankers report it."""
        tokens = self.prompt_tokens
        return ShortUsage(tokens, tokens, PromptTokensDetails(self.cached_tokens))

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that no forward pass computed for this request."""
        results = self.results or (() if self.result is None else (self.result,))
        if not results:
            return 0
        computed = sum(result.computed_tokens for result in results)
        return max(0, self.engine_request.num_prompt_tokens - computed)


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """The paths of a dialect, and the functions that read and answer its bodies.

    `decode`, `check`, `prepare` and `encode` are called in this order, the last three by `answer`.
    Small bodies are prepared, and small answers encoded, on the event loop, others in a thread.

    Args:
        paths: the routes of the dialect.
        summary: a few words, for /docs.
        description: a sentence, for /docs.
        bodies: types of the bodies, for /docs.
        answers: types of the answers, for /docs; empty for a route that is always refused.
        example: a body that the demo model answers, for /docs.
        decode: decodes a body and makes all checks that need no model. With limits, it decodes in
            parts, and stops once there are more values than they allow. May set `variant` of the
            record. Raises InvalidRequest or TooManyItems.
        check: checks fields that need the served model, which is None while it loads; runs before
            the model's name is checked. Raises GpuscoreError.
        prepare: makes the engine's request; announces each piece of work on text (`announce`).
            Raises GpuscoreError.
        encode: returns the answer as JSON, in pieces that each take about a millisecond to make
            (`in_pieces`). Only what comes before the first one may fail, and the pieces hold no
            more of the request than they need, because a client may take long to read them.
        answer_bytes: returns the most bytes that the answer can have, besides FRAME_BYTES and the
            model's name, for a body that is prepared.
        is_small: returns True if `prepare` takes no longer than handing the body to a thread.
        errors: types of the error bodies, for /docs.
        encode_error: returns an error as JSON, for the record's `variant`.
    """

    paths: tuple[str, ...]
    summary: str
    description: str
    bodies: tuple[type[msgspec.Struct], ...]
    answers: tuple[Any, ...]
    example: dict[str, Any]
    decode: Callable[[bytes, RequestRecord, RequestLimits | None], BodyT]
    prepare: Callable[[LoadedModel, BodyT], PreparedBody[BodyT]]
    encode: Callable[[PreparedBody[BodyT]], Iterator[bytes]]
    answer_bytes: Callable[[PreparedBody[BodyT]], int]
    check: Callable[[BodyT, LoadedModel | None], None] = lambda *_: None
    is_small: Callable[[BodyT], bool] = lambda _: False
    errors: tuple[type[msgspec.Struct], ...] = (ErrorAnswer,)
    encode_error: Callable[[GpuscoreError, str], bytes] = encode_error


def choose(models: ModelTable, dialect: Dialect[BodyT], body: BodyT) -> ServedModel:
    """Return the model that a body is for, once the dialect has checked the body's fields.

    Raises:
        GpuscoreError: a field is invalid, or there is no such model.
    """
    served = models.find(body.model) or models.only
    dialect.check(body, None if served is None else served.loaded)
    return models.choose(body.model)


def answered_name(served: ServedModel, body: CheckedBody) -> str:
    """Return the model's name for the answer: as the caller wrote it, or else its own."""
    return served.name if body.model is None else body.model


NUMBERS = 4096  # numbers of a piece
ROWS = 512  # rows of a piece that have several fields
CHARS = 2**16  # characters of a piece
# In the place of a list or a text that `in_pieces` fills in. No JSON holds this byte.
_HOLE = b"\0"
HOLE: Any = msgspec.Raw(_HOLE)

NUMBER_BYTES = 25  # of a float64, such as -2.2250738585072014e-308, and a comma
COUNT_BYTES = 12  # of a count, an index or a token id below 2**31, and a comma
FRAME_BYTES = 2048  # of the fields that every answer has: names, ids, usage
_CHAR_BYTES = 6  # of \u0000; every other character takes less


def in_pieces(answer: object, *parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the JSON of an answer whose holes are filled with these parts, in their order."""
    first, *others = msgspec.json.encode(answer).split(_HOLE)
    yield first
    for part, after in zip(parts, others, strict=True):
        yield from part
        yield after


def list_json(rows: Iterable[object], size: int = NUMBERS) -> Iterator[bytes]:
    """Yield the JSON of a list, `size` entries at a time."""
    rows = iter(rows)
    before = b"["
    while some := list(islice(rows, size)):
        yield before + msgspec.json.encode(some)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def lists_json(
    entries: Iterator[object], counts: Iterable[int | None], size: int
) -> Iterator[bytes]:
    """Yield the JSON of a list of lists. Each takes a count of entries in turn; None is null."""
    before = b"["
    for count in counts:
        yield before
        if count is None:
            yield b"null"
        else:
            yield from list_json(islice(entries, count), size)
        before = b","
    yield b"[]" if before == b"[" else b"]"


def text_json(*texts: str) -> Iterator[bytes]:
    """Yield the JSON string of these texts joined, CHARS characters at a time."""
    yield b'"'
    for text in texts:
        for start in range(0, len(text), CHARS):
            yield msgspec.json.encode(text[start : start + CHARS])[1:-1]
    yield b'"'


def text_bytes(*texts: str | None) -> int:
    """Return the most bytes of JSON that texts take, each with a comma; None is null."""
    return sum(4 if text is None else _CHAR_BYTES * len(text) for text in texts) + 3 * len(texts)


def error_bytes(errors: Sequence[ItemError] | None) -> int:
    """Return the most bytes that the errors of single items take in an answer."""
    return sum(64 + text_bytes(error.code, error.message) for error in errors or ())
