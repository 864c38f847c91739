"""The dialect of /v1/classify: vLLM's body and answer.

A guard's texts are put into its prompt. If the model has classes, or the body names labels, each
text is a prompt of its own.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from gpuscore.dialects.answers import ClassifiedText, ClassifyAnswer
from gpuscore.dialects.decoding import accepting, check_not_negative, strict_decoder
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBER_BYTES,
    NUMBERS,
    ROWS,
    Dialect,
    PreparedBody,
    in_pieces,
    list_json,
    text_bytes,
)
from gpuscore.dialects.paths import CLASSIFY_PATHS
from gpuscore.dialects.served import LoadedModel
from gpuscore.dialects.wire import ReturnMass, ScoringBody, about
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.classes import build_classes
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.types.results import label_mass


@accepting("pooling", "chat", "classify")
class ClassifyBody(ScoringBody):
    """Body of POST /v1/classify and /classify. `null` means a field's default."""

    input: Annotated[
        str | list[str],
        about(
            "At least one text: for a guard, the text to judge; for other models, a whole prompt "
            "that the model reads as it is."
        ),
    ]
    query: Annotated[
        str | None, about("For guards: the user's message that each text of `input` answers.")
    ] = None
    labels: Annotated[
        list[str] | None,
        about(
            "Classes to choose from: names of the model's classes, or texts of any length. "
            "Null means all classes of a guard or classification model; other models need it."
        ),
    ] = None
    use_activation: Annotated[
        bool | None, about("false: logits instead of probabilities.", True)
    ] = None
    raw_scores: Annotated[
        bool | None, about("true: as `use_activation: false`; Infinity's name.", False)
    ] = None
    truncate: Annotated[
        bool | None,
        about("For guards: cuts texts at their end where their prompts would not fit.", False),
    ] = None
    max_tokens_per_doc: Annotated[
        int | None,
        about("For guards: cuts longer texts at their end, to this many tokens; 0 is never.", 0),
    ] = None
    return_label_mass: ReturnMass = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def num_items(self) -> int:
        return len(self.texts)


_TEXT_BYTES = 96 + 2 * COUNT_BYTES  # field names, index, number of classes, `truncated`


def _check(body: ClassifyBody) -> None:
    if not body.input:
        raise InvalidRequest("input must hold at least one text", param="input")
    check_not_negative(body, "max_tokens_per_doc")


def prepare_classify(model: LoadedModel, body: ClassifyBody) -> PreparedBody[ClassifyBody]:
    """Build the engine's request.

    Raises:
        GpuscoreError: the request is invalid, or neither the model nor the body names classes.
    """
    rerank_input = RerankInput(
        query=body.query,
        documents=body.texts,
        most_tokens=body.max_tokens_per_doc or None,
        fit=bool(body.truncate),
        terms=body.terms,
        need_lse=bool(body.return_label_mass),
        name="input",
    )
    request, classes = build_classes(model.prompts, rerank_input, body.labels)
    return PreparedBody.of(body, request, classes)


def classify_bytes(prepared: PreparedBody[ClassifyBody]) -> int:
    labels = prepared.notes.labels
    longest = max(map(text_bytes, labels), default=0)
    row = _TEXT_BYTES + longest + NUMBER_BYTES * (len(labels) + 1)
    return row * prepared.body.num_items + text_bytes(*labels)


def encode_classify(prepared: PreparedBody[ClassifyBody]) -> Iterator[bytes]:
    classes = prepared.notes
    result = prepared.scores
    count = prepared.body.num_items
    body = prepared.body
    labels = classes.labels
    raw = body.raw_scores or body.use_activation is False
    request = prepared.engine_request if body.return_label_mass else None
    truncated = set(classes.truncated)
    step = max(1, NUMBERS // len(labels))

    def data() -> Iterator[ClassifiedText]:
        for start in range(0, count, step):
            items = slice(start, start + step)
            part = result.part(items)
            logits = np.stack(part.label_logits).astype(np.float64)
            best = logits.argmax(axis=1).tolist()
            rows = logits if raw else classes.probabilities(logits)
            masses = [None] * len(best)
            if request is not None:
                masses = label_mass(part, request.label_ids[items], request.trie).tolist()
            classified = zip(best, rows.tolist(), masses, strict=True)
            for index, (first, probs, mass) in enumerate(classified, start):
                row = ClassifiedText(index, labels[first], probs, len(labels))
                row.label_mass = mass
                row.truncated = index in truncated
                yield row

    answer = ClassifyAnswer(*prepared.head("list"), labels, HOLE, prepared.short_usage)
    return in_pieces(answer, list_json(data(), min(step, ROWS)))


CLASSIFY = Dialect(
    paths=CLASSIFY_PATHS,
    summary="Classify texts",
    description="The probability of each class, for texts in a guard's own prompt or as they are.",
    bodies=(ClassifyBody,),
    answers=(ClassifyAnswer,),
    decode=strict_decoder(ClassifyBody, _check),
    prepare=prepare_classify,
    encode=encode_classify,
    answer_bytes=classify_bytes,
    example={
        "input": ["query: blue lamp\nitem: A red steel lamp.", "query: lamp\nitem: A lamp."],
        "labels": ["yes", "no"],
    },
)
