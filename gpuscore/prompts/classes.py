"""Building a `ScoreRequest` whose labels are classes: a guard's, a classification model's, or a
caller's."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuscore.errors import InvalidRequest, MissingLabels
from gpuscore.prompts.family import Activation, sigmoid
from gpuscore.prompts.model import ModelPrompts
from gpuscore.prompts.registry import names_of
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.request import ScoreRequest
from gpuscore.types.results import softmax

NO_CLASSES = (
    "this model has no classes and belongs to no known family of guards: give labels, or name its "
    f"family (--family; family= in Python: {names_of(ranks=False)})"
)


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that the engine's logits belong to.

    Args:
        labels: names of the classes.
        activation: turns logits into answers, see `ClassifierHead`.
        truncated: indices of the texts that were cut.
    """

    labels: list[str]
    activation: Activation
    truncated: tuple[int, ...] = ()

    def probabilities(self, logits: Float64Array) -> Float64Array:
        """Return probabilities [N, classes], from 0 to 1; the logits if they are a regression's."""
        if self.activation == "none":
            return logits
        return softmax(logits) if self.activation == "softmax" else sigmoid(logits)


def build_classes(
    prompts: ModelPrompts, inputs: RerankInput, named: Sequence[str] | None
) -> tuple[ScoreRequest, Classes]:
    """Return the request and its classes. The texts are prompts as they are, except for a guard.

    Args:
        prompts: the model's builders.
        inputs: the texts to judge are its documents; for guards, the query is what they answer.
        named: the classes to choose from; None: all of the model's.

    Raises:
        GpuscoreError: the texts or labels are invalid, or neither the model nor the caller names
            classes.
    """
    family = prompts.family
    builder = prompts.builder
    head = prompts.head
    if family is not None and not family.family.ranks and named is None:
        built = family.build(inputs)
        assert built.request is not None  # noqa: S101  (build raises errors of texts)
        return built.request, Classes(list(family.family.classes), "softmax", built.truncated)
    for name, value in (
        ("query", inputs.query),
        ("truncate", inputs.fit),
        ("max_tokens_per_doc", inputs.most_tokens),
    ):
        if value:
            raise InvalidRequest(f"{name} is for guards only, without labels", param=name)
    known = builder.backend.classes
    labels = list(named if named is not None else known or ())
    if named is None and known is None:
        raise MissingLabels(NO_CLASSES, param="labels")
    for index, label in enumerate(named or ()):
        if (first := labels.index(label)) < index:
            param = f"labels[{index}]"
            raise InvalidRequest(f"{param} is the same as labels[{first}]", param=param)
    score = ScoreInput(
        query="",
        items=inputs.documents,
        labels=named,
        label_token_ids=None if named is not None else range(len(labels)),
        need_lse=inputs.need_lse,
        terms=inputs.terms,
    )
    request = builder.build(score)
    if request is None:
        raise InvalidRequest("input must hold at least one text", param="input")
    return request, Classes(labels, "softmax" if head is None else head.activation)
