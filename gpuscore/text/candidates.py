"""Requests for rows within prompts, and log-probabilities of given tokens there.

Row r is the distribution after a prompt's token r, so it belongs to token r + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from gpuscore.errors import InvalidRequest, TooManyLabels, TooManyTokens
from gpuscore.text.extraction import MAX_SCORES
from gpuscore.text.score_input import PromptChecks
from gpuscore.types.batch import (
    NO_TOKENS,
    BackendLimits,
    Float32Array,
    Float64Array,
    Int32Array,
    Rows,
    common_prefix,
    int32_array,
)
from gpuscore.types.request import Readouts, ScoreRequest, ScoreResult, Terms

IDS = "prompt_logprob_token_ids"
START = "prompt_logprob_start"
MAX_CANDIDATES = 256  # of a row
MIN_SHARED = 4  # tokens of a query, which costs all items one more pass of attention

# One prompt's rows in parts: the number of labels of each row, and all log-probabilities.
Answered: TypeAlias = list[tuple[Int32Array, Float64Array]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that a request names, from row `start` of each prompt on.

    `lists` has one list for all rows, or with `by_row` one for each row of the only prompt.
    """

    lists: Sequence[Int32Array]
    by_row: bool
    start: int

    @staticmethod
    def read(
        ids: Sequence[int | list[int]],
        start: int,
        prompts: Sequence[Int32Array],
        checks: PromptChecks,
    ) -> "Candidates":
        """Return a body's candidates; raise GpuscoreError if they do not fit the prompts."""
        flat = [id for id in ids if isinstance(id, int)]
        nested = [row_ids for row_ids in ids if not isinstance(row_ids, int)]
        if flat and nested:
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
        lists: list[Int32Array] = []
        for row, row_ids in enumerate(nested or [flat]):
            param = f"{IDS}[{row}]" if nested else IDS
            if len(row_ids) > MAX_CANDIDATES:
                message = f"{len(row_ids)} candidates, the limit is {MAX_CANDIDATES}"
                raise TooManyLabels(message, param=param)
            lists.append(checks.ids(row_ids, param))
        candidates = Candidates(lists, bool(nested), start)
        if (total := candidates.count(prompts)) > MAX_SCORES:
            raise TooManyTokens(f"{total} candidates, the limit is {MAX_SCORES}", param=IDS)
        return candidates

    def count(self, prompts: Sequence[Int32Array]) -> int:
        """Return the number of log-probabilities of these prompts."""
        if self.by_row:
            return sum(map(len, self.lists))
        return sum((len(prompt) - 1 - self.start) * len(self.lists[0]) for prompt in prompts)

    def rows(
        self, prompt: Int32Array, first_labels: Int32Array, every: bool
    ) -> tuple[Rows, Int32Array]:
        """Return the rows of a prompt that are computed, and their labels.

        They are those with candidates and the last one, or with `every` all. Each has one label
        before the candidates: that of `first_labels` for its token.
        """
        start = self.start
        end = len(prompt) - 1
        places = np.arange(0 if every else start, len(prompt), dtype=np.int32)
        labels: list[Int32Array] = []
        for row in places.tolist():
            candidates = NO_TOKENS
            if start <= row < end:
                candidates = self.lists[row - start if self.by_row else 0]
            labels.append(np.append(first_labels[row], candidates))
        return Rows(places, int32_array([*map(len, labels)])), np.concatenate(labels)


def request_of(
    prompts: Sequence[Int32Array],
    rows: Sequence[Rows],
    labels: Sequence[Int32Array],
    backend: BackendLimits,
    terms: Terms = Terms(),  # noqa: B008  (it never changes)
    num_top: int = 0,
) -> ScoreRequest:
    """Return the engine's request for rows of prompts that begin alike."""
    length = _shared_length(prompts, backend)
    query_rows, query_labels = rows[0].part(0, length)
    parts = [
        prompt_rows.part(length, len(prompt))
        for prompt_rows, prompt in zip(rows, prompts, strict=True)
    ]
    item_rows = [part for part, _ in parts]
    return ScoreRequest(
        prompts[0][:length],
        tuple(prompt[length:] for prompt in prompts),
        tuple(ids[item_labels] for ids, (_, item_labels) in zip(labels, parts, strict=True)),
        need_lse=True,
        num_top=num_top,
        readouts=Readouts.of([query_rows, *item_rows], labels[0][query_labels]),
        **terms._asdict(),
    )


def _shared_length(prompts: Sequence[Int32Array], backend: BackendLimits) -> int:
    """Return the number of first tokens that are scored once for all these prompts.

    Their rows need the same labels, the tokens that follow. So they end one token before the end of
    what the prompts share. Of a single prompt, full pages are enough, because nothing else is found
    again. The number is 0 if sharing saves nothing, or if the pages are too few.
    """
    first = prompts[0]
    shared = min([len(first), *(common_prefix(first, prompt) for prompt in prompts[1:])])
    # With the bits of a prompt that is scored alone, all segments begin where chunks do.
    whole = backend.deterministic_chunk or (backend.page_size if len(prompts) == 1 else 1)
    length = (shared - 1) // whole * whole
    pages = -(-max(map(len, prompts)) // backend.page_size) + 1
    return length if length >= MIN_SHARED and pages <= backend.num_pages else 0


def apart(
    request: ScoreRequest, result: ScoreResult, every: bool
) -> tuple[ScoreResult, list[Answered]]:
    """Return the result as it would be without candidates, and each prompt's candidates.

    With `every` it has a row for each token, else for each prompt's last one.
    """
    readouts = request.readouts
    lse = result.lse
    assert readouts is not None and lse is not None  # noqa: S101, PT018  (candidates need them)
    rows = readouts.rows if len(readouts.query_labels) else readouts.rows[1:]
    ends = np.cumsum([len(part.places) for part in rows])
    first_logits: list[Float32Array] = []
    parts: Answered = []
    for (_, counts), logits, row_lse in zip(
        rows, result.label_logits, np.split(lse, ends[:-1]), strict=True
    ):
        first_logits.append(logits[np.cumsum(counts) - counts])
        values = logits.astype(np.float64) - np.repeat(row_lse, counts)
        parts.append((counts, np.minimum(values, 0.0)))
    shared = parts[: len(parts) - len(request.item_ids)]
    answered = [[*shared, part] for part in parts[len(shared) :]]
    if every:
        return replace(result, label_logits=tuple(first_logits)), answered
    last = ends[len(shared) :] - 1
    tops = (result.top_ids, result.top_logits)
    top_ids, top_logits = (None if part is None else part[last] for part in tops)
    return replace(result, lse=lse[last], top_ids=top_ids, top_logits=top_logits), answered


def candidate_rows(
    answered: Answered, prompt: Int32Array, start: int, every: bool
) -> Iterator[Float64Array]:
    """Yield the log-probabilities of each row's candidates, from row `start` of the prompt on;
    `every` as for `apart`."""
    every_row = (
        values[end - count + 1 : end]  # without the row's first label
        for counts, values in answered
        for count, end in zip(counts.tolist(), np.cumsum(counts).tolist(), strict=True)
    )
    skipped = start if every else 0
    return islice(every_row, skipped, skipped + len(prompt) - 1 - start)
