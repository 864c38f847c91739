"""Scoring in this process, without the server: `Scorer`, and `AsyncScorer` for asyncio."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from typing import Any, Self, TypedDict, TypeVar, Unpack

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig, RequestLimits
from gpuscore.config.options import checked
from gpuscore.engine.engine import Engine
from gpuscore.engine.ticket import Progress
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from gpuscore.offline.calls import (
    Call,
    classify_call,
    in_order,
    pairs_call,
    rerank_call,
    score_call,
    score_calls,
)
from gpuscore.offline.results import Classification, PairScores, Ranking, Scores
from gpuscore.prompts.model import ModelFiles
from gpuscore.types.call_arguments import (
    ClassifyOptions,
    FamilyOptions,
    Items,
    ScoreOptions,
    Text,
    awaited,
    takes_options,
)

ValueT = TypeVar("ValueT")

# Batches whose tokens many calls in a row keep in the engine, so that it never waits for texts.
AHEAD = 8
_UNLIMITED = RequestLimits(sys.maxsize, sys.maxsize, sys.maxsize, sys.maxsize)


class ModelSettings(TypedDict, total=False):
    """The fields of `ModelConfig` besides the model."""

    revision: str | None
    adapter: str | None
    backend: str
    device: str
    dtype: str
    quantization: str
    attention: str
    compile: str
    kernels: str
    max_batch_tokens: int | None
    cuda_graph_tokens: int | None
    max_model_len: int | None
    memory_fraction: float | None
    kv_cache_size: int | None
    deterministic: bool
    allow_degenerate: bool
    tensor_parallel: int
    threads: int | None


class LoadedScorer:
    """A model with its engine and its prompts. All methods may be called from several threads.

    Settings come from the arguments only; GPUSCORE_* variables and configuration files are read by
    the `gpuscore` command, not here.

    Args:
        model: "demo", a model directory, a hub name, or a whole `ModelConfig`, beside which no
            other setting may be given.
        family: the prompt family of `rerank`, `score_pairs` and guards, as `gpuscore serve
            --family`.
        revision: branch, tag or commit of a hub model.
        adapter: directory of a LoRA adapter (peft) that is merged into the model.
        backend: "torch" or "jax".
        device: "auto", "cpu", "cuda" or "tpu".
        dtype: "auto", "bfloat16", "float16" or "float32".
        quantization: "auto" or "w8a16".
        attention: as for `gpuscore serve`.
        compile: "auto", "on" or "off"; functions in C on a CPU.
        kernels: "auto", "triton" or "torch".
        max_batch_tokens: most tokens of one forward pass.
        cuda_graph_tokens: tokens of the largest batch that runs as a CUDA graph.
        max_model_len: longest prompt, in tokens.
        memory_fraction: share of the free memory to use for keys and values of queries.
        kv_cache_size: bytes for keys and values of queries, in place of `memory_fraction`.
        deterministic: compute every score to the same bits, whatever else is batched.
        allow_degenerate: load a quantised model although it has collapsed.
        tensor_parallel: devices that share the model, or on a CPU processes.
        threads: CPU threads.

    Raises:
        ConfigError: a setting has the wrong type or is out of range, or the model is not supported
            or, quantised, has collapsed.
    """

    def __init__(
        self,
        model: str | ModelConfig = "demo",
        *,
        family: str = "auto",
        **settings: Unpack[ModelSettings],
    ) -> None:
        if not isinstance(model, ModelConfig):
            model = ModelConfig(model, **settings)
        elif settings:
            raise ConfigError(f"{next(iter(settings))} is given beside a ModelConfig; set it there")
        config = checked(model)
        directory = model_directory(config.model, config.revision, config.adapter)
        files = ModelFiles.read(directory, family, [config.model])
        self._backend = create_backend(plan_backend(directory, config))
        try:
            self._prompts = files.prompts(self._backend.limits, _UNLIMITED)
            self._engine = Engine(self._backend, allow_degenerate=config.allow_degenerate)
        except BaseException:
            self._backend.close()  # else its threads would stay
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warmup(self) -> None:
        """Do the lazy set-up that would delay the first score; on CUDA also capture the graphs of
        small batches, which takes some seconds. Call it before the first score.
        """
        self._backend.warmup()

    def close(self) -> None:
        """Free the model and end the threads."""
        self._engine.close()

    def _many(self, calls: Iterator[Call[ValueT]]) -> Generator[ValueT, None, None]:
        """Yield the values of calls in their order, with several batches' tokens in the engine."""
        return in_order(calls, self._engine.score, AHEAD * self._backend.limits.max_tokens)


class Scorer(LoadedScorer):
    """Scores items with one model. A context manager; `close` frees the model."""

    @takes_options
    def score(
        self,
        query: Text,
        items: Items,
        *,
        progress: Progress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Score each `query + item` prompt for its labels, as POST /v1/score does.

        Args:
            query: text or token ids that all prompts share.
            items: texts if the query is a text, lists of token ids if it is one, from any iterable
                with an order; a single text is one item.
            progress: called from time to time with the number of items scored so far.
            **options: see `ScoreOptions`.

        Raises:
            GpuscoreError: as over HTTP, but without limits on the number of items or labels.
            TypeError: there is no such option.
        """
        return self._run(score_call, progress=progress, query=query, items=items, options=options)

    @takes_options
    def score_many(
        self, requests: Iterable[tuple[Text, Items]], **options: Unpack[ScoreOptions]
    ) -> Iterator[Scores]:
        """Score many pairs of a query and its items, and yield their scores in the given order.

        Faster than a loop over `score`: several batches of requests are in the engine at a time, so
        it is never idle while texts are prepared. `requests` may be a generator of any length.

        Args:
            requests: queries and items, as in `score`.
            **options: as in `score`, for all requests.

        Raises:
            GpuscoreError: as `score`, once the scores of all earlier requests have come; no more
                come then.
        """
        return self._many(score_calls(self._prompts, requests, options))

    @takes_options
    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        top_n: int | None = None,
        **options: Unpack[FamilyOptions],
    ) -> Ranking:
        """Order documents by relevance, in the prompt of the model's family, as POST /rerank does.

        Args:
            query: the query.
            documents: at least one text.
            top_n: number of best documents to return; None: all.
            **options: see `FamilyOptions`.

        Raises:
            InvalidRequest: the model belongs to no known family of rerankers.
            GpuscoreError: as over HTTP.
        """
        return self._run(
            rerank_call, query=query, documents=documents, top_n=top_n, options=options
        )

    @takes_options
    def score_pairs(
        self, pairs: Iterable[tuple[str, str]], **options: Unpack[FamilyOptions]
    ) -> PairScores:
        """Score pairs of a query and a document, in the prompt of the model's family.

        Args:
            pairs: queries and documents.
            **options: see `FamilyOptions`.

        Raises:
            GpuscoreError: as `rerank`.
        """
        return self._run(pairs_call, pairs=pairs, options=options)

    @takes_options
    def classify(
        self, texts: str | Iterable[str], **options: Unpack[ClassifyOptions]
    ) -> Classification:
        """Return the probability of each class, as POST /v1/classify does.

        Args:
            texts: for a guard, texts to judge in its own prompt; for other models, whole prompts.
            **options: see `ClassifyOptions`.

        Raises:
            MissingLabels: neither the model nor the call names classes.
            GpuscoreError: as over HTTP.
        """
        return self._run(classify_call, texts=texts, options=options)

    def _run(
        self,
        prepare: Callable[..., Call[ValueT]],
        progress: Progress | None = None,
        **arguments: Any,
    ) -> ValueT:
        call = prepare(self._prompts, **arguments)
        if call.request is None:
            return call.finish(None)
        return call.finish(self._engine.score(call.request, progress).result())


class AsyncScorer(LoadedScorer):
    """`Scorer` for asyncio: the same methods, which let other tasks run while they wait.

    Texts are prepared in threads. A cancelled call drops its work that has not begun.
    """

    score = awaited(Scorer.score)
    rerank = awaited(Scorer.rerank)
    score_pairs = awaited(Scorer.score_pairs)
    classify = awaited(Scorer.classify)

    @takes_options
    async def score_many(
        self, requests: Iterable[tuple[Text, Items]], **options: Unpack[ScoreOptions]
    ) -> AsyncGenerator[Scores, None]:
        """See `Scorer.score_many`; iterate with `async for`. `requests` is read in threads."""
        async for scores in _iterated(self._many(score_calls(self._prompts, requests, options))):
            yield scores

    async def _run(
        self,
        prepare: Callable[..., Call[ValueT]],
        progress: Progress | None = None,
        **arguments: Any,
    ) -> ValueT:
        call = await asyncio.to_thread(prepare, self._prompts, **arguments)
        if call.request is None:
            return call.finish(None)
        result = await asyncio.wrap_future(self._engine.score(call.request, progress))
        return call.finish(result)

    async def __aenter__(self) -> "AsyncScorer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


async def _iterated(values: Generator[ValueT, None, None]) -> AsyncGenerator[ValueT, None]:
    """Yield the values, each computed in a thread; close the generator at an early end."""

    def end(step: "asyncio.Future[ValueT | None]") -> None:
        if not step.cancelled():
            step.exception()  # of a call that nobody awaits any more
        values.close()

    step = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, values, None))
            value = await asyncio.shield(step)  # a thread goes on when its task is cancelled
            if value is None:
                return
            yield value
    finally:
        if step is not None:  # a generator cannot be closed while it runs
            step.add_done_callback(end)
