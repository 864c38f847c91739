"""`Scorer`: the whole straight line in-process, without the server."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from gpuscore.arrays import Float32Array, Float64Array
from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits
from gpuscore.config.options import checked
from gpuscore.engine.engine import Engine
from gpuscore.engine.ticket import Progress
from gpuscore.errors import InvalidRequest
from gpuscore.hub import model_directory
from gpuscore.probabilities import check_temperature, label_logprobs, label_mass, label_scores
from gpuscore.text.joining import PromptBuilder, ScoreInput
from gpuscore.text.tokenizer import TextEncoder

_UNLIMITED = RequestLimits(
    max_items=sys.maxsize, max_labels=sys.maxsize, max_request_tokens=sys.maxsize
)


@dataclass(frozen=True, slots=True)
class Scores:
    """Rows belong to items, columns to labels; float64.

    With one list of labels per item, of different lengths, `scores`, `logprobs` and `logits` are
    filled up with NaN on the right.
    """

    scores: Float64Array  # [N, labels]
    logprobs: Float64Array | None  # [N, labels], full vocabulary, or all classes
    label_mass: Float64Array | None  # [N]
    prompt_tokens: int
    cached_tokens: int
    logits: Float64Array | None = None  # [N, labels], as the model's head gives them


class Scorer:
    """Scores items with one model. A context manager; `close` frees the model.

    Values come from the arguments only: GPUSCORE_* variables and configuration files are for the
    `gpuscore` command.

    Args:
        model: "demo", a model directory, a hub name, or a whole `ModelConfig`.
        **options: further fields of `gpuscore.config.ModelConfig`, such as dtype="float32".

    Raises:
        ConfigError: an option of wrong type or out of range, or a model that cannot be served.
    """

    def __init__(self, model: str | ModelConfig = "demo", **options: object) -> None:
        config = model if isinstance(model, ModelConfig) else ModelConfig(model, **options)  # type: ignore[arg-type]
        config = checked(config)
        directory = model_directory(config.model, config.revision)
        backend = create_backend(plan_backend(directory, config))
        self._backend = backend
        self._engine = Engine(backend, EngineConfig())
        self._builder = PromptBuilder(TextEncoder.read(directory), backend.limits, _UNLIMITED)

    def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        labels: Sequence[str] | None = None,
        label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        logprobs: bool = False,
        logits: bool = False,
        progress: Progress | None = None,
    ) -> Scores:
        """Score each `query + item` prompt for its labels; meaning as in POST /v1/score.

        Args:
            query: text or token ids, which all prompts share.
            items: all texts, or all lists of token ids, as the query is; a lone text is one
                item.
            labels: label texts of one token each, or names of a classification model's classes; or
                label_token_ids, tokens or numbers of classes: one list for all items, or one list
                per item.
            apply_softmax: normalise over the labels instead of the vocabulary or all classes.
            temperature: divides the logits; other than 1.0 only with apply_softmax.
            item_first: prompts are item + query.
            logprobs: also return full-vocabulary log-probabilities and the label mass.
            logits: also return the labels' logits, the one thing that a model of one class says.
            progress: called now and then with the number of items scored.

        Raises:
            GpuscoreError: as over HTTP, without limits on the number of items or labels.
        """
        check_temperature(temperature, apply_softmax)
        if isinstance(labels, str):  # a sequence of texts as well, of its characters
            raise InvalidRequest("labels must be a list of texts, not one text", param="labels")
        if isinstance(items, str):
            items = [items]
        given = ScoreInput(
            query=query if isinstance(query, str) else list(query),
            items=[item if isinstance(item, str) else list(item) for item in items],
            labels=labels,
            label_token_ids=label_token_ids,
            item_first=item_first,
            need_lse=logprobs or not apply_softmax,
        )
        request = self._builder.build(given)
        if request is None:
            return Scores(np.empty((0, 0)), None, None, 0, 0)
        result = self._engine.score(request, progress).result()
        rows = label_scores(result, apply_softmax=apply_softmax, temperature=temperature)
        return Scores(
            scores=_rectangle(rows),
            logprobs=_rectangle(label_logprobs(result)) if logprobs else None,
            label_mass=label_mass(result, request.label_ids) if logprobs else None,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=max(0, request.num_prompt_tokens - result.computed_tokens),
            logits=_rectangle(result.label_logits) if logits else None,
        )

    def warmup(self) -> None:
        """Do now what the first scores would wait for, and on CUDA capture the graphs that small
        batches run as, which takes some seconds. To be called before the first `score`.
        """
        self._backend.warmup()

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _rectangle(rows: Sequence[Float64Array | Float32Array]) -> Float64Array:
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
    return table
