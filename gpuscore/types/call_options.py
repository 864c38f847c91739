"""Options of calls that `Scorer`, `AsyncScorer` and the clients have in common.

Each option is defined once, here: its name, its type with its default (`Annotated[type, default]`),
and its meaning. Methods take them as `**options: Unpack[...]`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import InvalidRequest
from gpuscore.types.call_inputs import ids_or_lists, lists_of_ids, texts
from gpuscore.types.item_errors import OnError, check_text

Ids: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Text: TypeAlias = str | Ids
Items: TypeAlias = str | Iterable[str] | Iterable[Ids]
Labels: TypeAlias = Iterable[str] | None
LabelIds: TypeAlias = Ids | Iterable[int] | Iterable[Ids] | None
LabelSequences: TypeAlias = Iterable[Ids] | None

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
OptionsT = TypeVar("OptionsT", bound=Mapping[str, Any])


class ScoreOptions(TypedDict, total=False):
    """Options of `score` and `score_many`.

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


class LocalScoreOptions(ScoreOptions, total=False):
    """Options of `score` in this process: those of `ScoreOptions`, and `logits`."""

    logits: Annotated[bool, False]


class FamilyOptions(TypedDict, total=False):
    """Options of `rerank` and `score_pairs`, which use the prompt of the model's family.

    Attributes:
        instruction: replaces the family's own.
        raw_scores: return raw scores instead of relevances from 0 to 1.
        max_tokens_per_doc: cut longer documents at their end.
        truncate: cut documents where their prompts would not fit the model.
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
        query: for guards: the user's message that each text answers.
        labels: the classes to choose from, if not all of the model's: names of classes, or texts
            of one token each.
        max_tokens_per_doc: for guards: cut longer texts at their end.
        truncate: for guards: cut texts where their prompts would not fit the model.
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


def checked_options(kind: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    """Return all options of a kind, those that are not given with their defaults; lists are read.

    Raises:
        TypeError: there is no such option.
        InvalidRequest: labels are neither text nor token ids, or another text is none.
    """
    own = defaults(kind)
    for name in given:
        if name not in own:
            raise TypeError(f"unexpected keyword argument {name!r}; there are {', '.join(own)}")
    found = {**own, **given}
    for name in found:
        if name in _READERS and found[name] is not None:
            found[name] = _READERS[name](found[name], name)
    for name in ("query", "instruction"):
        if found.get(name) is not None:
            check_text(found[name], name)
    return found  # type: ignore[return-value]


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
    given = tuple(options["labels"] or options["label_token_ids"] or ())
    return () if any(isinstance(label, list) for label in given) else tuple(map(str, given))


def is_mean(options: ScoreOptions) -> bool:
    """Return True if labels' log-probabilities are divided by numbers of tokens.

    Raises:
        InvalidRequest: the option has another value than "none" and "mean".
    """
    name: Literal["label_length_normalization"] = "label_length_normalization"
    if options[name] not in ("none", "mean"):
        raise InvalidRequest(f'{name} must be "none" or "mean"', param=name)
    return options[name] == "mean"
