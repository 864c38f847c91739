"""Scoring in this process, without the server."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Self, Unpack

import numpy as np

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig, RequestLimits
from gpuscore.config.options import checked
from gpuscore.engine.engine import Engine
from gpuscore.engine.ticket import Progress
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.models.hub import model_directory
from gpuscore.offline.results import (
    Classification,
    PairScores,
    Ranking,
    Scores,
    TokenCounts,
    column,
    rectangle,
)
from gpuscore.prompts.classes import build_classes
from gpuscore.prompts.model import ModelFiles
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.readouts import Candidates, by_prompt, request_of
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import BoolArray, Float32Array, Float64Array
from gpuscore.types.call_arguments import (
    ClassifyOptions,
    FamilyOptions,
    Ids,
    Items,
    ScoreOptions,
    Text,
    checked_options,
    ids_or_lists,
    is_mean,
    label_names,
    listed,
    pairs_of,
    takes_options,
    text_or_ids,
    token_ids,
)
from gpuscore.types.call_arguments import texts as texts_of
from gpuscore.types.item_errors import ItemErrors, check_on_error, check_text, checked_texts
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.results import (
    check_temperature,
    label_logprobs,
    label_mass,
    label_scores,
    rows_apart,
    scored_places,
    spread,
)

_UNLIMITED = RequestLimits(sys.maxsize, sys.maxsize, sys.maxsize, sys.maxsize)


class Scorer:
    """Scores items with one model. A context manager; `close` frees the model.

    All methods may be called from several threads; their requests share batches. Settings come from
    the arguments only; GPUSCORE_* variables and configuration files are read by the `gpuscore`
    command, not here.

    Args:
        model: "demo", a model directory, a hub name, or a whole `ModelConfig`, beside which no
            other setting may be given.
        family: the prompt family of `rerank`, `score_pairs` and guards, as `gpuscore serve
            --family`.
        **settings: the other fields of `ModelConfig`, such as `dtype` or `threads`.

    Raises:
        ConfigError: a setting has the wrong type or is out of range, or the model is not supported,
            or is quantised and has collapsed.
        TypeError: there is no such setting.
    """

    def __init__(
        self, model: str | ModelConfig = "demo", *, family: str = "auto", **settings: Any
    ) -> None:
        if not isinstance(model, ModelConfig):
            model = ModelConfig(model, **settings)
        elif settings:
            raise ConfigError(f"{next(iter(settings))} must be set in the ModelConfig")
        config = checked(model)
        directory = model_directory(config.model, config.revision, config.adapter)
        files = ModelFiles.read(directory, family, [config.model])
        self._backend = create_backend(plan_backend(directory, config))
        try:
            self._prompts = files.prompts(self._backend.limits, _UNLIMITED)
            self._engine = Engine(self._backend, allow_degenerate=config.allow_degenerate)
        except BaseException:
            self._backend.close()  # else its threads would keep running
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
            GpuscoreError: the error that HTTP would give, but items and labels may be any number.
            TypeError: there is no such option.
        """
        options = checked_options(ScoreOptions, options)
        softmax = options["apply_softmax"]
        temperature = options["temperature"]
        check_temperature(temperature, softmax)
        mean = is_mean(options)
        names = label_names(options)
        errors = ItemErrors() if check_on_error(options["on_error"]) else None
        checked_query = text_or_ids(query, "query")
        read = _items(items, checked_query, errors)
        extraction = options["extraction_token_id"]
        if extraction is None:
            extraction = self._prompts.step_token
        inputs = ScoreInput(
            query=checked_query,
            items=read,
            labels=options["labels"],  # type: ignore[arg-type]  # lists by now
            label_token_ids=options["label_token_ids"],  # type: ignore[arg-type]
            label_sequences=options["label_sequences"],  # type: ignore[arg-type]
            item_first=options["item_first"],
            need_lse=options["logprobs"] or not softmax,
            extraction=extraction,
        )
        request = self._prompts.builder.build(inputs, errors)
        failed = errors.listed() if errors else ()
        if options["logits"] and request is not None and request.trie is not None:
            raise InvalidRequest("labels of several tokens have no logits", param="logits")

        offsets = None
        left_out = failed
        count = len(read)
        if extraction is not None:
            places = () if request is None or request.readouts is None else request.readouts.places
            rows_of = spread(map(len, places[1:]), failed, len(read))
            offsets = np.cumsum([0, *(rows or 0 for rows in rows_of)])
            left_out = ()  # an item in `errors` has no rows
            count = int(offsets[-1])

        def table(rows: Sequence[Float64Array | Float32Array]) -> Float64Array:
            return rectangle([*spread(rows, left_out, count)], len(names))

        result = self._result(request, progress)
        scores: Sequence[Float64Array] = ()
        logits: Sequence[Float32Array] = ()
        logprobs = scores
        mass: Float64Array | None = None
        if request is not None and result is not None:
            labels, result = rows_apart(request, result)
            lengths = request.trie.lengths if mean and request.trie else None
            scores = label_scores(
                result, apply_softmax=softmax, temperature=temperature, lengths=lengths
            )
            if options["logprobs"]:
                logprobs = label_logprobs(result)
                mass = label_mass(result, labels, request.trie)
            logits = result.label_logits
        return Scores(
            scores=table(scores),
            logprobs=table(logprobs) if options["logprobs"] else None,
            label_mass=column(mass, left_out, count) if options["logprobs"] else None,
            **_usage(request, result),
            logits=table(logits) if options["logits"] else None,
            labels=names,
            errors=failed,
            offsets=offsets,
        )

    def logprobs(
        self, ids: Ids, candidates: Ids | Iterable[Ids], *, start: int = 0
    ) -> list[Float64Array]:
        """Return the log-probabilities of candidates after each token of a prompt: an array for
        each row from `start` on, as POST /v1/completions with `prompt_logprob_token_ids` does.

        Args:
            ids: the prompt. Row r is the distribution after token r, so it belongs to token r + 1;
                a prompt of n tokens has the rows 0 to n - 2.
            candidates: token ids, the same for all rows, or a list of them for each row.
            start: the first row.

        Raises:
            GpuscoreError: the error that HTTP would give.
        """
        if self._backend.limits.classes is not None:
            raise InvalidRequest("this model predicts classes, not tokens")
        builder = self._prompts.builder
        row_ids = ids_or_lists(candidates, "candidates")
        prompts = builder.whole_prompts([token_ids(ids, "ids")], special=False, name="ids")
        chosen = Candidates.read(row_ids, start, prompts, builder.checks)
        request = request_of(prompts, chosen, builder.backend)
        (rows,) = by_prompt(request, self._engine.score(request).result())
        return [*rows.candidates(chosen.num_rows(prompts[0]))]

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
            documents: the documents' texts, at least one.
            top_n: number of best documents to return; None: all.
            **options: see `FamilyOptions`.

        Raises:
            InvalidRequest: the model belongs to no known family of rerankers.
            GpuscoreError: the error that HTTP would give.
        """
        options = checked_options(FamilyOptions, options)
        check_text(query, "query")
        read = listed(documents, "documents")
        if top_n is not None and top_n < 1:
            raise InvalidRequest(f"top_n is {top_n}, it must be at least 1", param="top_n")
        scored = self._score_in_family(query, read, options, name="documents")
        places = np.array(scored_places(scored.errors, len(read)), dtype=np.int64)
        chosen = places[np.argsort(-scored.scores[places], kind="stable")[:top_n]]
        return Ranking(
            indices=chosen,
            scores=scored.scores[chosen],
            truncated=scored.truncated[chosen],
            documents=tuple(read[index] for index in chosen.tolist()),
            prompt_tokens=scored.prompt_tokens,
            cached_tokens=scored.cached_tokens,
            errors=scored.errors,
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
            GpuscoreError: the errors of `rerank`.
        """
        options = checked_options(FamilyOptions, options)
        read = pairs_of(pairs)
        queries = [query for query, _ in read]
        documents = [document for _, document in read]
        return self._score_in_family(queries, documents, options, name="pairs")

    @takes_options
    def classify(
        self, texts: str | Iterable[str], **options: Unpack[ClassifyOptions]
    ) -> Classification:
        """Return the probability of each class, as POST /v1/classify does.

        Args:
            texts: texts that a guard judges in its prompt; whole prompts for other models.
            **options: see `ClassifyOptions`.

        Raises:
            MissingLabels: neither the model nor the call names classes.
            GpuscoreError: the error that HTTP would give.
        """
        options = checked_options(ClassifyOptions, options)
        read = texts_of([texts] if isinstance(texts, str) else texts, "texts")
        inputs = RerankInput(
            options["query"],
            read,
            most_tokens=options["max_tokens_per_doc"],
            fit=options["truncate"],
            name="input",
        )
        labels: Any = options["labels"]  # a list by now
        request, classes = build_classes(self._prompts, inputs, labels)
        result = self._engine.score(request).result()
        logits = np.stack(result.label_logits).astype(np.float64)
        names = tuple(classes.labels)
        return Classification(
            classes=names,
            probabilities=classes.probabilities(logits),
            best=tuple(names[index] for index in logits.argmax(axis=1).tolist()),
            truncated=_flags(classes.truncated, len(logits)),
            **_usage(request, result),
        )

    def _score_in_family(
        self, query: str | list[str], documents: Sequence[str], options: FamilyOptions, name: str
    ) -> PairScores:
        """Score documents, in their order, in the prompt of the family."""
        family = self._prompts.reranker
        inputs = RerankInput(
            query,
            documents,
            instruction=options["instruction"],
            most_tokens=options["max_tokens_per_doc"],
            fit=options["truncate"],
            name=name,
        )
        errors = ItemErrors() if check_on_error(options["on_error"]) else None
        if errors is None:
            if isinstance(query, list):
                checked_texts(query, name, None)
            checked_texts(documents, name, None)
        built = family.build(inputs, errors)
        failed = errors.listed() if errors else ()
        result = self._result(built.request)
        scores = None if result is None else family.raw_scores(result)
        if scores is not None and not options["raw_scores"]:
            scores = family.family.relevance(scores)
        return PairScores(
            scores=column(scores, failed, len(documents)),
            truncated=_flags(built.truncated, len(documents)),
            **_usage(built.request, result),
            errors=failed,
        )

    def _result(
        self, request: ScoreRequest | None, progress: Progress | None = None
    ) -> ScoreResult | None:
        """Return the engine's result; None if there is no item to score."""
        return None if request is None else self._engine.score(request, progress).result()


def _flags(indices: Sequence[int], count: int) -> BoolArray:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(indices)] = True
    return flags


def _usage(request: ScoreRequest | None, result: ScoreResult | None) -> TokenCounts:
    """Return the numbers of tokens of a result."""
    if request is None or result is None:
        return {"prompt_tokens": 0, "cached_tokens": 0}
    tokens = request.num_prompt_tokens
    return {"prompt_tokens": tokens, "cached_tokens": max(0, tokens - result.computed_tokens)}


def _items(
    items: Items, query: str | list[int], errors: ItemErrors | None
) -> list[str | list[int]]:
    """Return the items; an empty item replaces each that is neither text nor ids."""
    elements = [items] if isinstance(items, str) else listed(items, "items")
    is_text = any(isinstance(item, str) for item in elements) or (isinstance(query, str) and query)
    read: list[str | list[int]] = []
    for index, item in enumerate(elements):
        try:
            read.append(text_or_ids(item, f"items[{index}]"))
        except InvalidRequest as error:
            if errors is None:
                raise
            errors.add(index, error)
            read.append("" if is_text else [])
    return read
