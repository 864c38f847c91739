"""`Scorer`: scoring in this process, without the server."""

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
    """Results of `Scorer.score`, float64: rows belong to items, columns to labels.

    If items have different numbers of labels, `scores`, `logprobs` and `logits` are padded with NaN
    on the right.

    Attributes:
        scores: [N, labels], probabilities.
        logprobs: [N, labels], over the full vocabulary or all classes; None unless asked for.
        label_mass: [N], the probability of all labels of an item together; None unless `logprobs`
            was asked for.
        prompt_tokens: tokens of all prompts, each counted as a whole.
        cached_tokens: prompt tokens that were not computed again.
        logits: [N, labels], as the model's head gives them; None unless asked for.
    """

    scores: Float64Array  # [N, labels]
    logprobs: Float64Array | None  # [N, labels]
    label_mass: Float64Array | None  # [N]
    prompt_tokens: int
    cached_tokens: int
    logits: Float64Array | None = None  # [N, labels]


class Scorer:
    """Scores items with one model. A context manager; `close` frees the model.

    Settings come from the arguments only; GPUSCORE_* variables and configuration files are read by
    the `gpuscore` command, not here.

    Args:
        model: "demo", a model directory, a hub name, or a whole `ModelConfig`.
        **options: further fields of `gpuscore.config.ModelConfig`, such as dtype="float32".

    Raises:
        ConfigError: an option has the wrong type or is out of range, or the model is not supported
            or, quantised, has collapsed.
    """

    def __init__(self, model: str | ModelConfig = "demo", **options: object) -> None:
        config = model if isinstance(model, ModelConfig) else ModelConfig(model, **options)  # type: ignore[arg-type]
        config = checked(config)
        directory = model_directory(config.model, config.revision)
        backend = create_backend(plan_backend(directory, config))
        self._backend = backend
        self._engine = Engine(backend, EngineConfig(), allow_degenerate=config.allow_degenerate)
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
        """Score each `query + item` prompt for its labels, as POST /v1/score does.

        Args:
            query: text or token ids that all prompts share.
            items: texts if the query is a text, lists of token ids if it is one; a single text is
                one item.
            labels: label texts of one token each, or names of a classification model's classes.
                Give either these or `label_token_ids`.
            label_token_ids: token ids, or numbers of classes; one list for all items, or one list
                per item.
            apply_softmax: normalise over the labels instead of the vocabulary or all classes.
            temperature: divides the logits; must be 1.0 without apply_softmax.
            item_first: prompts are item + query.
            logprobs: also return full-vocabulary log-probabilities and the label mass.
            logits: also return the labels' logits, the only meaningful output of a model with a
                single class.
            progress: called from time to time with the number of items scored so far.

        Raises:
            GpuscoreError: as over HTTP, but without limits on the number of items or labels.
        """
        check_temperature(temperature, apply_softmax)
        if isinstance(labels, str):  # would be taken for a sequence of one-character labels
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
        """Do the lazy set-up that would delay the first score; on CUDA also capture the graphs of
        small batches, which takes some seconds. Call it before the first `score`.
        """
        self._backend.warmup()

    def close(self) -> None:
        """Free the model and end the threads."""
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
