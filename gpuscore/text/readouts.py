"""Requests for rows within prompts: after every extraction token of an item, or after any tokens of
a prompt, with candidates of their own.

Row r is the distribution after a prompt's token r, so it belongs to token r + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from gpuscore.errors import GpuscoreError, InvalidRequest, TooManyLabels, TooManyTokens
from gpuscore.text.score_input import PromptChecks, ScoreInput, need_encoder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import (
    NO_ROWS,
    NO_TOKENS,
    BackendLimits,
    Float64Array,
    Int32Array,
    Rows,
    common_prefix,
    int32_array,
)
from gpuscore.types.request import Readouts, ScoreRequest, ScoreResult, Terms

MAX_SCORES = 2**22  # most scores of a request; an answer takes about twenty bytes for each
IDS = "prompt_logprob_token_ids"
START = "prompt_logprob_start"
MAX_CANDIDATES = 256  # of a row
MIN_SHARED = 4  # tokens of a query, which costs all items one more pass of attention


def extraction_id(
    token: str | int, inputs: ScoreInput, encoder: TextEncoder | None, backend: BackendLimits
) -> int:
    """Return the id of a request's extraction token.

    Raises:
        InvalidRequest: the text is not one token, the model does not have the id, or a query of
            token ids contains it.
    """
    param = "score_extraction_token"
    if inputs.item_first:
        raise InvalidRequest(f"{param} cannot be used with item_first", param="item_first")
    if isinstance(token, str):
        ids = need_encoder(encoder, param).plain_ids(token).tolist()
        if len(ids) != 1:
            raise InvalidRequest(f"{param} is {len(ids)} tokens; it must be one", param=param)
        token = int(ids[0])
    else:
        param += "_id"
    if not 0 <= token < backend.vocab_rows:
        raise InvalidRequest(
            f"{param} is {token}, valid are 0 to {backend.vocab_rows - 1}", param=param
        )
    if not isinstance(inputs.query, str):
        check_query(token, inputs.query)
    return token


def check_query(token: int, query: Sequence[int] | Int32Array) -> None:
    """Raise InvalidRequest if the query holds the extraction token."""
    if len(places := np.flatnonzero(np.asarray(query) == token)):
        raise InvalidRequest(
            f"token {places[0]} of the query is the extraction token, {token}; only items may "
            "hold it",
            param="query",
        )


def read_at(
    token: int, query: Int32Array, items: Sequence[Int32Array], labels: Sequence[Int32Array]
) -> tuple[Int32Array, tuple[Int32Array, ...], tuple[Int32Array, ...], Readouts]:
    """Return query, items, labels and read-outs of a request with an extraction token.

    All its occurrences end up in the items: if the query contains it, because the items share a
    beginning, the rest of the query from there on is moved back to the items.

    Raises:
        TooManyLabels: the rows have more than MAX_SCORES labels in all.
    """
    if len(in_query := np.flatnonzero(query == token)):
        rest = query[in_query[0] :]
        query = query[: in_query[0]]
        items = [np.concatenate((rest, item)) for item in items]
    places = [np.flatnonzero(item == token).astype(np.int32) for item in items]
    pairs = [*zip(places, labels, strict=True)]
    total = sum(len(at) * len(ids) for at, ids in pairs)
    if total > MAX_SCORES:
        param = "score_extraction_token"
        raise TooManyLabels(f"{total} scores, the limit is {MAX_SCORES}", param=param)
    rows = [Rows(at, np.full_like(at, len(ids)), np.tile(ids, len(at))) for at, ids in pairs]
    return query, tuple(items), tuple(own.labels for own in rows), Readouts.of([NO_ROWS, *rows])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that a request names, from row `start` of each prompt on."""

    ids: Int32Array  # of every row; or of all rows of the only prompt, row by row
    counts: Int32Array | None  # ids of each of its rows; None = every row has all ids
    start: int

    @staticmethod
    def read(
        ids: Sequence[int | list[int]],
        start: int,
        prompts: Sequence[Int32Array],
        checks: PromptChecks,
    ) -> "Candidates":
        """Return a body's candidates; raise GpuscoreError if they do not fit the prompts."""
        nested = [row_ids for row_ids in ids if not isinstance(row_ids, int)]
        if nested and len(nested) < len(ids):
            raise InvalidRequest(f"{IDS} must be token ids, or a list of them per row", param=IDS)
        for index, prompt in enumerate(prompts):
            if not 0 <= start < len(prompt) - 1:
                raise InvalidRequest(
                    f"{START} is {start}, but prompt[{index}] of {len(prompt)} tokens has the rows "
                    f"0 to {len(prompt) - 2}",
                    param=START,
                )
        rows = len(prompts[0]) - 1 - start
        if nested and (len(prompts) > 1 or len(nested) != rows):
            expected = rows if len(prompts) == 1 else "one prompt's"
            raise InvalidRequest(f"{IDS} has {len(ids)} lists for {expected} rows", param=IDS)
        lists: list[tuple[str, Any]]
        lists = [(f"{IDS}[{row}]", row_ids) for row, row_ids in enumerate(nested)] or [(IDS, ids)]
        for param, row_ids in lists:
            if len(row_ids) > MAX_CANDIDATES:
                message = f"{len(row_ids)} candidates, the limit is {MAX_CANDIDATES}"
                raise TooManyLabels(message, param=param)
        try:
            checked = checks.ids([*chain.from_iterable(row_ids for _, row_ids in lists)], IDS)
        except GpuscoreError:
            for param, row_ids in lists:
                checks.ids(row_ids, param)  # raises the error with the row's name
            raise
        counts = int32_array([*map(len, nested)]) if nested else None
        candidates = Candidates(checked, counts, start)
        if (total := candidates.count(prompts)) > MAX_SCORES:
            raise TooManyTokens(f"{total} candidates, the limit is {MAX_SCORES}", param=IDS)
        return candidates

    def count(self, prompts: Sequence[Int32Array]) -> int:
        """Return the number of log-probabilities of these prompts."""
        rows = sum(map(self.num_rows, prompts))
        return len(self.ids) * (rows if self.counts is None else 1)

    def num_rows(self, prompt: Int32Array) -> int:
        """Return the number of a prompt's rows that have candidates."""
        return len(prompt) - 1 - self.start

    def rows(self, prompt: Int32Array, every: bool) -> Rows:
        """Return the rows of a prompt that are computed.

        They are those with candidates and the last one, or with `every` all. Each has one label
        before the candidates: the token that follows.
        """
        ids = self.ids
        counts = self.counts
        if counts is None:
            counts = np.full(self.num_rows(prompt), len(ids), np.int32)
            ids = np.tile(ids, len(counts))
        counts = np.pad(counts, (self.start if every else 0, 1))
        places = np.arange(len(prompt) - len(counts), len(prompt), dtype=np.int32)
        labels = np.insert(ids, np.cumsum(counts) - counts, following(prompt)[places])
        return Rows(places, counts + np.int32(1), labels)


NO_CANDIDATES = Candidates(NO_TOKENS, None, 0)


def following(prompt: Int32Array) -> Int32Array:
    """Return the token that follows each token; the last one's value is not used."""
    return np.append(prompt[1:], prompt[:1])


def request_of(
    prompts: Sequence[Int32Array],
    candidates: Candidates,
    backend: BackendLimits,
    terms: Terms = Terms(),  # noqa: B008  (it never changes)
    num_top: int = 0,
    every: bool = False,
) -> ScoreRequest:
    """Return the engine's request for rows of prompts that begin alike, see `Candidates.rows`."""
    length = _shared_length(prompts, backend)
    whole = [candidates.rows(prompt, every) for prompt in prompts]
    items = [rows.part(length, int(rows.places[-1]) + 1) for rows in whole]
    return ScoreRequest(
        prompts[0][:length],
        tuple(prompt[length:] for prompt in prompts),
        tuple(rows.labels for rows in items),
        need_lse=True,
        num_top=num_top,
        readouts=Readouts.of([whole[0].part(0, length), *items]),
        **terms._asdict(),
    )


def _shared_length(prompts: Sequence[Int32Array], backend: BackendLimits) -> int:
    """Return the number of first tokens that are scored once for all these prompts.

    Their rows need the same labels, the tokens that follow. So they end one token before the end of
    what the prompts share. In a single prompt they are full pages, because only these are cached.
    The number is 0 if sharing saves nothing, or if there are too few pages.
    """
    first = prompts[0]
    shared = min([len(first), *(common_prefix(first, prompt) for prompt in prompts[1:])])
    # With --deterministic, bits are as of a prompt alone, so segments must begin where chunks do.
    whole = backend.deterministic_chunk or (backend.page_size if len(prompts) == 1 else 1)
    length = (shared - 1) // whole * whole
    pages = -(-max(map(len, prompts)) // backend.page_size) + 1
    return length if length >= MIN_SHARED and pages <= backend.num_pages else 0


class PromptRows(NamedTuple):
    """The result of one prompt's rows, and the number of labels of each row."""

    result: ScoreResult
    counts: Int32Array

    @property
    def first_labels(self) -> ScoreResult:
        """The result of the first label of each row."""
        (logits,) = self.result.label_logits
        starts = np.cumsum(self.counts) - self.counts
        return replace(self.result, label_logits=(logits[starts],))

    def candidates(self, count: int) -> Iterator[Float64Array]:
        """Yield the log-probabilities of all labels but the first one, of `count` rows before the
        last one."""
        lse = self.result.lse
        assert lse is not None  # noqa: S101  (`request_of` needs it)
        values = self.result.label_logits[0].astype(np.float64) - np.repeat(lse, self.counts)
        logprobs = np.minimum(values, 0.0)
        ends = np.cumsum(self.counts)[-1 - count :]
        for start, end in pairwise((ends - self.counts[-1 - count :]).tolist()):
            yield logprobs[start + 1 : end]


def by_prompt(request: ScoreRequest, result: ScoreResult) -> Iterator[PromptRows]:
    """Yield each prompt's rows: those of the query, then those of its item."""
    read = request.readouts
    bounds = request.first_rows
    query_logits = result.label_logits[: -len(request.item_ids)]
    for item, rows in enumerate(pairwise(bounds)):
        some = np.append(np.arange(bounds[0]), np.arange(*rows))
        logits = np.concatenate((*query_logits, result.label_logits[len(query_logits) + item]))
        counts = int32_array([len(logits)])
        if read is not None:
            counts = np.concatenate((read.counts[0], read.counts[1 + item]))
        yield PromptRows(result.rows(some, (logits,)), counts)
