"""The wire of /v1/classify: vLLM's body and answer. Texts are put into a guard's prompt, or are
prompts themselves where the model has classes or the body names labels."""

from dataclasses import dataclass
from functools import partial
from time import time

import msgspec
import numpy as np

from gpuscore.engine.scores import label_mass, softmax
from gpuscore.errors import InvalidRequest, MissingLabels
from gpuscore.families.family import sigmoid
from gpuscore.families.prompts import RerankInput
from gpuscore.server.dialects.dialect import Dialect
from gpuscore.server.paths import CLASSIFY_PATHS
from gpuscore.server.record import RESPOND, TOKENIZE, RequestRecord
from gpuscore.server.schema import (
    CacheSalt,
    Priority,
    ShortUsage,
    check_not_negative,
    decoding_errors,
)
from gpuscore.server.service import (
    SMALL_ITEMS,
    Call,
    LoadedModel,
    ScoringService,
    cached_tokens,
)
from gpuscore.text.prompts import ScoreInput
from gpuscore.text.turns import Turns
from gpuscore.types import Float64Array, ScoreRequest, ScoreResult

NO_CLASSES = (
    "this model has no classes and is of no known family of guards: labels is required, or start "
    "the server with --family"
)


class ClassifyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/classify and /classify. `null` means a field's default."""

    input: str | list[str]
    model: str | None = None
    query: str | None = None
    labels: list[str] | None = None
    use_activation: bool | None = None
    truncate: bool | None = None
    max_tokens_per_doc: int | None = None
    return_label_mass: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = None
    request_id: str | None = None


class ClassifiedText(msgspec.Struct, omit_defaults=True):
    """`probs` are in the order of the answer's `labels`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    label_mass: float | None = None
    truncated: bool = False


class ClassifyAnswer(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    labels: list[str]
    data: list[ClassifiedText]
    usage: ShortUsage


@dataclass(frozen=True, slots=True)
class Question:
    """What the model is asked, and how its answer is read.

    Args:
        request: to the engine.
        labels: names of the classes.
        exclusive: probabilities are a softmax over them, else each is a sigmoid.
        truncated: texts that were cut.
    """

    request: ScoreRequest
    labels: list[str]
    exclusive: bool
    truncated: tuple[int, ...] = ()


_decoder = msgspec.json.Decoder(ClassifyBody)


def decode_classify(body: bytes, record: RequestRecord) -> ClassifyBody:
    """Raises InvalidRequest whose message never holds the body's text."""
    with decoding_errors():
        decoded = _decoder.decode(body)
    if not decoded.input:
        raise InvalidRequest("input must hold at least one text", param="input")
    check_not_negative(decoded, "max_tokens_per_doc")
    return decoded


async def answer_classify(service: ScoringService, body: ClassifyBody, call: Call) -> bytes:
    """Raises GpuscoreError, also where neither model nor body say what classes there are."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    call.record.items = len(texts)
    name = service.model_name(body.model)
    model = service.loaded()
    with service.admitted(call.tenant):
        with call.record.stage(TOKENIZE):
            question = await service.in_turns(call, partial(_asked, model, body, texts))
        result = await service.run(model, question.request, body.cache_salt, call)
        with call.record.stage(RESPOND):
            tokens = question.request.num_prompt_tokens
            call.record.prompt_tokens = tokens
            call.record.cached_tokens = cached_tokens(question.request, result)
            encode = partial(_encoded, call.record.request_id, name, body, question, result)
            small = len(texts) <= SMALL_ITEMS
            return encode() if small else await service.in_thread(call, encode)


def _asked(model: LoadedModel, body: ClassifyBody, texts: list[str], turns: Turns) -> Question:
    guard = model.family
    if guard is not None and not guard.family.ranks and body.labels is None:
        given = RerankInput(
            query=body.query,
            documents=texts,
            most_tokens=body.max_tokens_per_doc or None,
            fit=bool(body.truncate),
            priority=body.priority or 0,
            need_lse=bool(body.return_label_mass),
            name="input",
        )
        built = guard.build(given, turns)
        return Question(built.request, list(guard.family.classes), True, built.truncated)
    for field in ("query", "truncate", "max_tokens_per_doc"):
        if getattr(body, field):
            raise InvalidRequest(f"{field} is for models with a prompt of their own", param=field)
    classes = model.engine.limits.classes
    labels = body.labels if body.labels is not None or classes is None else list(classes)
    if labels is None:
        raise MissingLabels(NO_CLASSES, param="labels")
    ids = None if body.labels is not None else range(len(labels))
    score = ScoreInput(
        query="",
        items=texts,
        labels=body.labels,
        label_token_ids=ids,
        need_lse=bool(body.return_label_mass),
        priority=body.priority or 0,
    )
    request = model.builder.build(score, turns)
    assert request is not None  # noqa: S101  (there is a text)
    return Question(request, labels, model.head is None or model.head.exclusive)


def _encoded(
    id: str, name: str, body: ClassifyBody, question: Question, result: ScoreResult
) -> bytes:
    logits = np.stack(result.label_logits).astype(np.float64)
    best = logits.argmax(axis=1).tolist()
    raw = body.use_activation is False
    rows = logits if raw else probabilities(logits, question.exclusive)
    masses = None
    if body.return_label_mass:
        masses = label_mass(result, question.request.label_ids).tolist()
    cut = set(question.truncated)
    labels = question.labels
    data = [
        ClassifiedText(
            index,
            labels[best[index]],
            probs,
            len(labels),
            None if masses is None else masses[index],
            index in cut,
        )
        for index, probs in enumerate(rows.tolist())
    ]
    tokens = question.request.num_prompt_tokens
    usage = ShortUsage(tokens, tokens)
    answer = ClassifyAnswer(id, "list", int(time()), name, labels, data, usage)
    return msgspec.json.encode(answer)


def probabilities(logits: Float64Array, exclusive: bool) -> Float64Array:
    """[N, classes], from 0 to 1."""
    return softmax(logits) if exclusive else sigmoid(logits)


CLASSIFY = Dialect(
    paths=CLASSIFY_PATHS,
    summary="Classify texts",
    description="The probability of each class, in a guard's own prompt or of the text as it is.",
    bodies=(ClassifyBody,),
    answers=(ClassifyAnswer,),
    decode=decode_classify,
    answer=answer_classify,
    example={
        "input": ["query: blue lamp\nitem: A red steel lamp.", "query: lamp\nitem: A lamp."],
        "labels": ["yes", "no"],
    },
)
