"""Requests for rows within prompts, and log-probabilities of given tokens there.

Row r is the distribution after a prompt's token r, so it belongs to token r + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from gpuscore.errors import InvalidRequest, TooManyLabels, TooManyTokens
from gpuscore.text.extraction import MAX_SCORES
from gpuscore.text.score_input import PromptChecks
from gpuscore.types.batch import BackendLimits, Float64Array, Int32Array, Rows, common_prefix
from gpuscore.types.request import Readouts, ScoreRequest, ScoreResult, Terms

IDS, START = "prompt_logprob_token_ids", "prompt_logprob_start"
MAX_CANDIDATES = 256  # of a row
LEAST_SHARED = 4  # tokens: a cut costs all items one more pass of attention


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that are asked for, from row `start` of each prompt on.

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
        by_row = bool(ids) and not isinstance(ids[0], int)
        if any(isinstance(entry, int) == by_row for entry in ids):
            raise InvalidRequest(f"{IDS} must be token ids, or a list of them per row", param=IDS)
        rows = [len(prompt) - 1 - start for prompt in prompts]
        for index, (prompt, count) in enumerate(zip(prompts, rows, strict=True)):
            if start < 0 or count < 1:
                raise InvalidRequest(
                    f"{START} is {start}, but prompt[{index}] of {len(prompt)} tokens has the rows "
                    f"0 to {len(prompt) - 2}",
                    param=START,
                )
        if by_row and (len(prompts) > 1 or len(ids) != rows[0]):
            wanted = rows[0] if len(prompts) == 1 else "one prompt's"
            raise InvalidRequest(f"{IDS} has {len(ids)} lists for {wanted} rows", param=IDS)
        pairs = [(f"{IDS}[{row}]", own) for row, own in enumerate(ids)] if by_row else [(IDS, ids)]
        lists: list[Int32Array] = []
        for param, own in pairs:
            if len(own) > MAX_CANDIDATES:  # type: ignore[arg-type]  # it is a list
                most = f"{len(own)} candidates, the limit is {MAX_CANDIDATES}"  # type: ignore[arg-type]
                raise TooManyLabels(most, param=param)
            lists.append(checks.ids(own, param))  # type: ignore[arg-type]
        made = Candidates(lists, by_row, start)
        if (total := made.count(prompts)) > MAX_SCORES:
            raise TooManyTokens(f"{total} candidates, the limit is {MAX_SCORES}", param=IDS)
        return made

    def count(self, prompts: Sequence[Int32Array]) -> int:
        """Return the number of log-probabilities of these prompts."""
        if self.by_row:
            return sum(map(len, self.lists))
        return sum((len(prompt) - 1 - self.start) * len(self.lists[0]) for prompt in prompts)

    def rows(
        self, prompt: Int32Array, own: Int32Array, every: bool, last: bool
    ) -> tuple[Rows, Int32Array]:
        """Return the rows of a prompt that are computed, and their labels.

        Args:
            own: the first label of each token's row, before the candidates.
            every: rows before the first one with candidates are asked for, too, and the last one.
            last: so is the last one.
        """
        end = len(prompt) - 1
        places = np.arange(0 if every else self.start, end + (every or last), dtype=np.int32)
        parts: list[Int32Array] = []
        counts = np.ones(len(places), np.int32)
        for number, row in enumerate(places.tolist()):
            parts.append(own[row : row + 1])
            if self.start <= row < end:
                parts.append(self.lists[row - self.start if self.by_row else 0])
                counts[number] += len(parts[-1])
        return Rows(places, counts), np.concatenate(parts)


def request_of(
    prompts: Sequence[Int32Array],
    rows: Sequence[Rows],
    labels: Sequence[Int32Array],
    backend: BackendLimits,
    terms: Terms = Terms(),  # noqa: B008  (it never changes)
    num_top: int = 0,
) -> ScoreRequest:
    """Return the engine's request for rows of prompts that begin alike."""
    cut = positions_cut(prompts, backend)
    query, of_query = rows[0].part(0, cut)
    parts = [own.part(cut, len(prompt)) for own, prompt in zip(rows, prompts, strict=True)]
    return ScoreRequest(
        prompts[0][:cut],
        tuple(prompt[cut:] for prompt in prompts),
        tuple(ids[own] for ids, (_, own) in zip(labels, parts, strict=True)),
        need_lse=True,
        num_top=num_top,
        readouts=Readouts.of([query, *(own for own, _ in parts)], labels[0][of_query]),
        **terms._asdict(),
    )


def positions_cut(prompts: Sequence[Int32Array], backend: BackendLimits) -> int:
    """Return the number of first tokens that are scored once for all these prompts.

    All rows up to the cut get the same labels, the tokens that follow. So the cut is one token
    before the end of what the prompts share. Of a single prompt, full pages are enough, because
    nothing else is found again. It is 0 if sharing saves nothing, or if the pages are too few.
    """
    first = prompts[0]
    shared = min([len(first), *(common_prefix(first, prompt) for prompt in prompts[1:])])
    # With the bits of a prompt that is scored alone, all segments begin where chunks do.
    whole = backend.deterministic_chunk or (backend.page_size if len(prompts) == 1 else 1)
    cut = (shared - 1) // whole * whole
    pages = -(-max(map(len, prompts)) // backend.page_size) + 1
    return cut if cut >= LEAST_SHARED and pages <= backend.num_pages else 0


def apart(
    request: ScoreRequest, result: ScoreResult, every: bool
) -> tuple[ScoreResult, list["Answered"]]:
    """Return the result as it would be without candidates, and each prompt's candidates.

    With `every` it has a row for each token, else for each prompt's last one.
    """
    read, lse = request.readouts, result.lse
    assert read is not None and lse is not None  # noqa: S101, PT018  (candidates need them)
    rows = read.rows if len(read.query_labels) else read.rows[1:]
    starts = [np.cumsum(own.counts) - own.counts for own in rows]
    first = [logits[at] for logits, at in zip(result.label_logits, starts, strict=True)]
    ends = np.cumsum([*map(len, first)])
    parts = [
        Answered(own.counts - 1, _others(logits, at, lse[end - len(at) : end], own.counts))
        for own, logits, at, end in zip(rows, result.label_logits, starts, ends, strict=True)
    ]
    shared = parts[: len(parts) - len(request.item_ids)]
    answered = [Answered.joined([*shared, part]) for part in parts[len(shared) :]]
    if every:
        return replace(result, label_logits=tuple(first)), answered
    last = ends[len(shared) :] - 1
    tops = (result.top_ids, result.top_logits)
    top_ids, top_logits = (None if part is None else part[last] for part in tops)
    return replace(result, lse=lse[last], top_ids=top_ids, top_logits=top_logits), answered


def _others(
    logits: np.ndarray, starts: np.ndarray, lse: np.ndarray, counts: np.ndarray
) -> Float64Array:
    """Return the log-probabilities of all labels of rows but each row's first."""
    kept = np.ones(len(logits), np.bool_)
    kept[starts] = False
    values = logits.astype(np.float64) - np.repeat(lse, counts)
    others: Float64Array = np.minimum(values, 0.0)[kept]
    return others


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's rows: how many candidates each has, and their log-probabilities."""

    counts: Int32Array
    logprobs: Float64Array

    @staticmethod
    def joined(parts: Sequence["Answered"]) -> "Answered":
        counts, logprobs = zip(*((part.counts, part.logprobs) for part in parts), strict=True)
        return Answered(np.concatenate(counts), np.concatenate(logprobs))

    def rows(self, skipped: int, rows: int) -> Iterator[Float64Array]:
        """Yield the log-probabilities of rows after the first `skipped` ones."""
        ends = np.cumsum(self.counts).tolist()
        for row in range(skipped, skipped + rows):
            yield self.logprobs[ends[row] - self.counts[row] : ends[row]]
