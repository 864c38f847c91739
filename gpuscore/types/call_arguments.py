"""Arguments of calls of `Scorer`: lists, texts, token ids, options.

A text is a `str`. Token ids are a sequence of integers or a 1-d NumPy array of them. A list is
anything that can be iterated in an order; it is read once. Everything else is refused by name.

Each option is defined once, here: its name, its type with its default (`Annotated[type, default]`),
and its meaning. Methods take them as `**options: Unpack[...]`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypedDict,
    TypeGuard,
    TypeVar,
    get_type_hints,
)

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import InvalidRequest
from gpuscore.types.item_errors import OnError, check_text, checked_texts, kind_of

_BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but hardly ever meant as ids


def listed(argument: Any, name: str) -> list[Any]:
    """Return a caller's list, which may be an iterator; raise InvalidRequest for a value that is
    none: a text, bytes, or values without order."""
    if isinstance(argument, str):  # would be taken for a sequence of texts of one character
        raise InvalidRequest(f"{name} must be a list, not one text", param=name)
    no_list = isinstance(argument, (*_BYTES, Mapping, set, frozenset))
    wrong = no_list or not isinstance(argument, Iterable)
    # Iterating over a table gives the names of its columns; an array [] cannot be iterated.
    if wrong or hasattr(argument, "columns") or getattr(argument, "ndim", 1) == 0:
        raise InvalidRequest(f"{name} is {kind_of(argument)}; it must be a list", param=name)
    return list(argument)


def texts(argument: Any, name: str) -> list[str]:
    """Return a list of texts; raise InvalidRequest, with the place, for anything else."""
    return checked_texts(listed(argument, name), name, None)


def token_ids(argument: Any, param: str) -> list[int]:
    """Return token ids as plain integers; raise InvalidRequest, with the place, for others."""
    if not _is_sequence(argument):
        raise InvalidRequest(f"{param} is {kind_of(argument)}; it must be token ids", param=param)
    values = argument
    if isinstance(argument, np.ndarray):
        if argument.ndim != 1 or (argument.size and argument.dtype.kind not in "iuO"):
            shown = f"{argument.dtype} {list(argument.shape)}"
            raise InvalidRequest(
                f"{param} is an array of {shown}; it must be of integers [n]", param=param
            )
        values = argument.tolist()
    if set(map(type, values)) <= {int}:
        return list(values)
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise InvalidRequest(
                f"{param}[{place}] is {kind_of(value)}; it must be an integer", param=param
            )
    return [int(value) for value in values]


def text_or_ids(argument: Any, param: str) -> str | list[int]:
    """Return a text as it is, or token ids as plain integers; raise InvalidRequest for the rest."""
    if _is_sequence(argument):
        return token_ids(argument, param)
    if not isinstance(argument, str):
        what = f"{param} is {kind_of(argument)}; it must be a text or token ids"
        raise InvalidRequest(what, param=param)
    check_text(argument, param)
    return argument


def lists_of_ids(argument: Any, name: str) -> list[list[int]]:
    """Return lists of token ids; raise InvalidRequest, with the place, for anything else."""
    return [token_ids(ids, f"{name}[{index}]") for index, ids in enumerate(listed(argument, name))]


def ids_or_lists(argument: Any, name: str) -> list[int] | list[list[int]]:
    """Return token ids, or lists of token ids if the first element is a list."""
    elements = listed(argument, name)
    if elements and _is_sequence(elements[0]):
        return lists_of_ids(elements, name)
    return token_ids(elements, name)


def pairs_of(argument: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of `score_pairs`; raise InvalidRequest unless they are pairs."""
    pairs = listed(argument, "pairs")
    for index, pair in enumerate(pairs):
        if not _is_sequence(pair) or len(pair) != 2:
            param = f"pairs[{index}]"
            raise InvalidRequest(f"{param} must be a query and a document", param=param)
    return pairs


def _is_sequence(argument: object) -> TypeGuard[Any]:
    return isinstance(argument, Sequence | np.ndarray) and not isinstance(argument, (str, *_BYTES))


Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Text: TypeAlias = str | Ids
Items: TypeAlias = str | Iterable[str] | Iterable[Ids]
Labels: TypeAlias = Iterable[str] | None
LabelIds: TypeAlias = Ids | Iterable[int] | Iterable[Ids] | None
LabelSequences: TypeAlias = Iterable[Ids] | None

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
OptionsT = TypeVar("OptionsT", bound=Mapping[str, Any])


class ScoreOptions(TypedDict, total=False):
    """Options of `score`.

    Attributes:
        labels: label texts, or names of a classification model's classes. Give these,
            `label_token_ids` or `label_sequences`.
        label_token_ids: token ids, or numbers of classes; one list for all items, or one list
            per item.
        label_sequences: labels as lists of token ids, for all items.
        label_length_normalization: "mean": the logarithm of a label's probability is divided by
            its number of tokens before it becomes a score.
        apply_softmax: normalise over the labels instead of the vocabulary or all classes.
        temperature: divides the logits; must be 1.0 without apply_softmax.
        item_first: prompts are item + query.
        logprobs: also return full-vocabulary log-probabilities and the label mass.
        on_error: "fail": an item that cannot be scored raises its error; "null": it gets a row
            of NaN and stands in `errors`, and the others are scored.
        logits: also return the labels' logits, the only meaningful output of a model with a single
            class; labels of several tokens have none.
        extraction_token_id: score each item after every occurrence of this token, not after its
            last one; see `Scores.offsets`.
    """

    labels: Annotated[Labels, None]
    label_token_ids: Annotated[LabelIds, None]
    label_sequences: Annotated[LabelSequences, None]
    label_length_normalization: Annotated[Literal["none", "mean"], "none"]
    apply_softmax: Annotated[bool, False]
    temperature: Annotated[float, 1.0]
    item_first: Annotated[bool, False]
    logprobs: Annotated[bool, False]
    on_error: Annotated[OnError, "fail"]
    logits: Annotated[bool, False]
    extraction_token_id: Annotated[int | None, None]


class FamilyOptions(TypedDict, total=False):
    """Options of `rerank` and `score_pairs`, which use the prompt of the model's family.

    Attributes:
        instruction: replaces the family's own.
        raw_scores: return raw scores instead of relevances from 0 to 1.
        max_tokens_per_doc: truncate longer documents at their end.
        truncate: truncate documents whose prompts would not fit the model.
        on_error: "fail": a document that cannot be scored raises its error; "null": it stands in
            `errors`, without a rank and with a score of NaN, and the others are scored.
    """

    instruction: Annotated[str | None, None]
    raw_scores: Annotated[bool, False]
    max_tokens_per_doc: Annotated[int | None, None]
    truncate: Annotated[bool, False]
    on_error: Annotated[OnError, "fail"]


class ClassifyOptions(TypedDict, total=False):
    """Options of `classify`.

    Attributes:
        query: the user's message that each text answers; for guards only.
        labels: the classes to choose from, if not all of the model's: names of classes, or texts
            of any number of tokens.
        max_tokens_per_doc: truncate longer texts at their end; for guards only.
        truncate: truncate texts whose prompts would not fit the model; for guards only.
    """

    query: Annotated[str | None, None]
    labels: Annotated[Labels, None]
    max_tokens_per_doc: Annotated[int | None, None]
    truncate: Annotated[bool, False]


# How an option becomes a plain list, read once, or is refused: text or ids of another kind.
_READERS: Mapping[str, Callable[[Any, str], object]] = {
    "labels": texts,
    "label_token_ids": ids_or_lists,
    "label_sequences": lists_of_ids,
}


@cache
def defaults(kind: type) -> Mapping[str, Any]:
    """Return the options of a TypedDict by name, each with its default."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def checked_options(kind: type[OptionsT], unchecked: Mapping[str, Any]) -> OptionsT:
    """Return all options of a kind, with defaults for missing options; lists are read.

    Raises:
        TypeError: there is no such option.
        InvalidRequest: labels are neither text nor token ids, or another option should be text and
            is not.
    """
    known = defaults(kind)
    for name in unchecked:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}; known are {', '.join(known)}")
    options = {**known, **unchecked}
    for name in options:
        if name in _READERS and options[name] is not None:
            options[name] = _READERS[name](options[name], name)
    for name in ("query", "instruction"):
        if options.get(name) is not None:
            check_text(options[name], name)
    return options  # type: ignore[return-value]


def takes_options(method: MethodT) -> MethodT:
    """Show a method's `**options: Unpack[kind]` one by one in its signature, for `help`."""
    whole = signature(method)
    *first, options = whole.parameters.values()
    (kind,) = options.annotation.__args__
    hints = get_type_hints(kind)
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults(kind).items()
    ]
    method.__dict__["__signature__"] = whole.replace(parameters=[*first, *more])
    return method


def label_names(options: ScoreOptions) -> tuple[str, ...]:
    """Return the labels' texts, or their ids; nothing if items have labels of their own."""
    if (sequences := options["label_sequences"]) is not None:
        return tuple(" ".join(map(str, ids)) for ids in sequences)
    labels = tuple(options["labels"] or options["label_token_ids"] or ())
    return () if any(isinstance(label, list) for label in labels) else tuple(map(str, labels))


def is_mean(options: ScoreOptions) -> bool:
    """Return True if labels' log-probabilities are divided by numbers of tokens.

    Raises:
        InvalidRequest: the option has another value than "none" and "mean".
    """
    name: Literal["label_length_normalization"] = "label_length_normalization"
    if options[name] not in ("none", "mean"):
        raise InvalidRequest(f'{name} must be "none" or "mean"', param=name)
    return options[name] == "mean"
