"""Answers of /rerank and of /v1/classify."""

from typing import Annotated, Any

import msgspec

from gpuscore.dialects.fields import AnsweredModel, AnswerId, Created, Index, Truncated, about
from gpuscore.dialects.schema import FailedItems, ShortUsage

LabelMass = Annotated[float | None, about("The probability of all labels together, if asked for.")]


class RankedDocument(msgspec.Struct, omit_defaults=True):
    index: Index
    relevance_score: Annotated[float, about("From 0 to 1, or the raw score if asked for.")]
    document: Annotated[
        dict[str, Any] | str | None,
        about('The document, if asked for: an object, a text as `{"text": ...}`.'),
    ] = None
    truncated: Truncated = False
    label_mass: LabelMass = None


class RerankAnswer(msgspec.Struct, omit_defaults=True):
    """Answer to `documents`."""

    id: AnswerId
    object: Annotated[str, about("`rerank`; `list` at /v1/rerank, as Jina's clients expect.")]
    created: Created
    model: AnsweredModel
    results: Annotated[
        list[RankedDocument],
        about("Best first; equal scores keep the request's order. Those in `errors` are left out."),
    ]
    usage: ShortUsage
    meta: Annotated[
        dict[str, Any],
        about("Cohere's metadata: version, units, tokens, and warnings of truncated documents."),
    ]
    errors: FailedItems = None


class RankedText(msgspec.Struct, omit_defaults=True):
    """A document in TEI's answer to `texts`, which lists the best first."""

    index: Index
    score: Annotated[float, about("From 0 to 1, or the raw score if asked for.")]
    text: Annotated[str | None, about("The document, if asked for.")] = None
    truncated: Truncated = False
    label_mass: LabelMass = None


class TeiError(msgspec.Struct):
    """TEI's error, for a body with `texts`."""

    error: str
    error_type: str


class ClassifiedText(msgspec.Struct, omit_defaults=True):
    """One text's classes."""

    index: Annotated[int, about("Number of the text in the request, from 0.")]
    label: Annotated[str, about("The most probable class.")]
    probs: Annotated[list[float], about("One per class, in the order of the answer's `labels`.")]
    num_classes: Annotated[int, about("Number of classes.")]
    label_mass: LabelMass = None
    truncated: Truncated = False


class ClassifyAnswer(msgspec.Struct):
    """Answer of POST /v1/classify and /classify."""

    id: AnswerId
    object: Annotated[str, about("Always `list`.")]
    created: Created
    model: AnsweredModel
    labels: Annotated[list[str], about("Names of the classes.")]
    data: Annotated[list[ClassifiedText], about("One per text, in the request's order.")]
    usage: ShortUsage
