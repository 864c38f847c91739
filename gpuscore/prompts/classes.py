"""Building a `ScoreRequest` whose labels are classes: a guard's, a classification model's, or a
caller's."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuscore.errors import InvalidRequest, MissingLabels
from gpuscore.prompts.discovery import ClassifierHead
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.family import sigmoid
from gpuscore.prompts.registry import names_of
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.boundaries import ALONE, Turns
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import softmax
from gpuscore.types.request import ScoreRequest

NO_CLASSES = (
    "this model has no classes and belongs to no known family of guards: give labels, or name its "
    f"family (--family; family= in Python: {names_of(ranks=False)})"
)


@dataclass(frozen=True, slots=True)
class ClassifyInput:
    """A caller's texts.

    Args:
        texts: at least one.
        query: for guards: the message that each text answers.
        labels: the classes to choose from; None: all of the model's.
        most_tokens: for guards: number of tokens after which a text is cut; None: not cut.
        fit: for guards: cut texts so that their prompts fit the model's context.
        priority: of the request; a lower value runs first.
        need_lse: ask for the log-sum-exp over the vocabulary.
    """

    texts: Sequence[str]
    query: str | None = None
    labels: Sequence[str] | None = None
    most_tokens: int | None = None
    fit: bool = False
    priority: int = 0
    need_lse: bool = False


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that the engine's logits belong to.

    Args:
        labels: names of the classes.
        exclusive: the probabilities are a softmax over the classes; otherwise each is a sigmoid.
        truncated: numbers of the texts that were cut.
    """

    labels: list[str]
    exclusive: bool
    truncated: tuple[int, ...] = ()

    def probabilities(self, logits: Float64Array) -> Float64Array:
        """Return probabilities [N, classes], from 0 to 1."""
        return softmax(logits) if self.exclusive else sigmoid(logits)


def build_classes(
    given: ClassifyInput,
    builder: PromptBuilder,
    family: FamilyPrompts | None,
    head: ClassifierHead | None,
    turns: Turns = ALONE,
) -> tuple[ScoreRequest, Classes]:
    """Return the request and its classes: a guard's in its own prompt, or of texts as they are.

    Raises:
        GpuscoreError: the texts or labels are invalid, or neither the model nor the caller names
            classes.
    """
    if family is not None and not family.family.ranks and given.labels is None:
        built = family.build(_guarded(given), turns)
        return built.request, Classes(list(family.family.classes), True, built.truncated)
    for name, value in (
        ("query", given.query),
        ("truncate", given.fit),
        ("max_tokens_per_doc", given.most_tokens),
    ):
        if value:
            raise InvalidRequest(f"{name} is for guards only, without labels", param=name)
    known = builder.backend.classes
    labels = list(given.labels if given.labels is not None else known or ())
    if given.labels is None and known is None:
        raise MissingLabels(NO_CLASSES, param="labels")
    score = ScoreInput(
        query="",
        items=given.texts,
        labels=given.labels,
        one_token=True,
        label_token_ids=None if given.labels is not None else range(len(labels)),
        need_lse=given.need_lse,
        priority=given.priority,
    )
    request = builder.build(score, turns)
    if request is None:
        raise InvalidRequest("input must hold at least one text", param="input")
    return request, Classes(labels, head is None or head.exclusive)


def _guarded(given: ClassifyInput) -> RerankInput:
    """Return the texts as documents for a guard's own prompt."""
    return RerankInput(
        query=given.query,
        documents=given.texts,
        most_tokens=given.most_tokens,
        fit=given.fit,
        priority=given.priority,
        need_lse=given.need_lse,
        name="input",
    )
