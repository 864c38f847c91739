"""Checks at start, with the weights that will serve.

*A quantised model still tells prompts apart.* Eight bits can destroy a model without an error:
scales that were lost or misread leave hidden states that are constant or infinite, and every item
gets the same score. A few prompts show it.

*A deterministic backend gives the same bits in every batch.* The backend's libraries, the CPU and
the number of threads decide whether a row's bits depend on its place in a batch.
"""

import logging
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpuscore.backends.base import Backend
from gpuscore.errors import ConfigError
from gpuscore.types.batch import (
    NO_TOKENS,
    BackendLimits,
    Float32Array,
    Float64Array,
    Int32Array,
    Prefix,
    Segment,
    pack,
    page_slots,
)

logger = logging.getLogger(__name__)

LENGTHS = (2, 3, 4, 6, 8, 11, 15, 20)  # tokens of the prompts
MAX_LABELS = 64
# Largest difference that rounding makes between equal log-probabilities, relative to the largest
# float32 number that they are computed from. Prompts of a working model are some nats apart.
IDENTICAL = 1e-6


def check_collapse(backend: Backend, allow: bool = False) -> None:
    """Score a few prompts, and refuse a model whose scores are useless.

    Args:
        backend: warmed up.
        allow: log the reasons for a refusal, and do not refuse.

    Raises:
        ConfigError: scores are not finite, or the same for all prompts.
    """
    reason = _refusal(*_score_prompts(backend))
    if reason is None:
        return
    if not allow:
        raise ConfigError(
            f"the quantised model has collapsed: {reason}; use another checkpoint, or "
            "--quantization w8a16, or serve it anyway with --allow-degenerate"
        )
    logger.warning("the quantised model has collapsed: %s (--allow-degenerate)", reason)


def known_prompts(limits: BackendLimits) -> list[Int32Array]:
    """Return different prompts of random ids, within the limits.

    All prompts of two tokens or more end with the same token: a model that has lost its layers
    answers by the last token alone.
    """
    rng = np.random.default_rng(0)
    longest = min(limits.max_model_len, limits.max_tokens)
    last = rng.integers(0, limits.vocab_rows)
    prompts = dict[bytes, Int32Array]()
    for length in LENGTHS:
        prompt = rng.integers(0, limits.vocab_rows, min(length, longest)).astype(np.int32)
        if longest > 1:
            prompt[-1] = last
        prompts[prompt.tobytes()] = prompt
    return list(prompts.values())


def known_labels(limits: BackendLimits) -> Int32Array:
    """Return label ids that are spread over the vocabulary, or over all classes."""
    count = min(MAX_LABELS, limits.label_rows)
    return np.linspace(0, limits.label_rows - 1, count).astype(np.int32)


def _score_prompts(backend: Backend) -> tuple[Float64Array, Float64Array]:
    """Return logits [P, L] of P known prompts and L known labels, and log-sum-exps [P]."""
    labels = known_labels(backend.limits)
    logits: list[Float32Array] = []
    lse: list[Float32Array] = []
    for prompt in known_prompts(backend.limits):
        alone = Segment(prompt, 0, 0, label_ids=labels, need_lse=True)
        scores = backend.collect(backend.extend(pack([alone], [Prefix(0, NO_TOKENS)])))
        assert scores.lse is not None  # noqa: S101  (it was requested)
        logits.append(scores.label_logits)
        lse.append(scores.lse)
    return np.stack(logits).astype(float), np.concatenate(lse).astype(float)


def _refusal(logits: Float64Array, lse: Float64Array) -> str | None:
    """Say why a model's scores are useless; None if nothing shows that they are."""
    count, labels = logits.shape
    broken = int((~np.isfinite(np.column_stack((logits, lse)))).any(axis=1).sum())
    if broken:
        return f"logits after {broken} of {count} known prompts are not finite"
    # The probability of a single class is always 1.
    values = logits if labels == 1 else logits - lse[:, None]
    difference = float(np.ptp(values, axis=0).max())
    rounding = IDENTICAL * max(1.0, float(np.abs(logits).max()), float(np.abs(lse).max()))
    if count > 1 and difference <= rounding:
        return (
            f"{count} different prompts get the same scores: those of {labels} labels differ by at "
            f"most {difference:.1e} nats, and rounding alone can cause {rounding:.1e}"
        )
    return None


ITEM_LENGTHS = (1, 3, 8, 15, 16, 17, 30, 31, 33, 20, 20, 20)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A query and items, which must get the same bits in every batch."""

    backend: Backend
    query: Int32Array
    items: tuple[Int32Array, ...]
    others: tuple[Int32Array, ...]  # segments of another request, between the items
    labels: Int32Array

    def with_the_query(self, order: NDArray[np.int64]) -> Int32Array:
        """Return the bits of these items, in one batch with the query as their parent."""
        parent = Segment(self.query, 0, 0)
        items = [self._segment(self.items[i], len(self.query), 0, 0) for i in order]
        return self._bits([parent, *items], [Prefix(0, NO_TOKENS)])

    def over_cached_pages(self, order: NDArray[np.int64]) -> Int32Array:
        """Return the bits of these items, over cached pages and between another request's segments.

        The query is first computed chunk by chunk into the pages.
        """
        limits = self.backend.limits
        page_size = limits.page_size
        chunk = limits.deterministic_chunk
        pages = np.arange(-(-len(self.query) // page_size), dtype=np.int32)
        for start in range(0, len(self.query), chunk):
            part = self.query[start : start + chunk]
            slots = page_slots(pages, start, start + len(part), page_size)
            batch = pack([Segment(part, start, 0, slots=slots)], [Prefix(start, pages)])
            self.backend.collect(self.backend.extend(batch))
        segments = [Segment(self.others[0], 0, 1)]
        for index in order:
            segments.append(self._segment(self.items[index], len(self.query), 0, -1))
            segments.append(Segment(self.others[1 + index], 0, 1))
        return self._bits(segments, [Prefix(len(self.query), pages), Prefix(0, NO_TOKENS)])

    def _segment(self, tokens: Int32Array, start: int, prefix: int, parent: int) -> Segment:
        return Segment(tokens, start, prefix, parent, label_ids=self.labels, need_lse=True)

    def _bits(self, segments: list[Segment], prefixes: list[Prefix]) -> Int32Array:
        """Return the bits of label logits and log-sum-exp, as int32 [scored rows, labels + 1]."""
        scores = self.backend.collect(self.backend.extend(pack(segments, prefixes)))
        assert scores.lse is not None  # noqa: S101  (it was requested)
        labels = scores.label_logits.reshape(len(scores.lse), -1)
        return np.column_stack((labels, scores.lse)).view(np.int32)


def check_same_bits(backend: Backend) -> None:
    """Raise ConfigError if an item's bits differ between batches."""
    trial = _trial(backend)
    order = np.arange(len(trial.items))
    expected = trial.with_the_query(order)
    different = np.zeros(len(order), dtype=np.bool_)
    different |= (trial.with_the_query(order[::-1]) != expected[::-1]).any(axis=1)[::-1]
    different |= (trial.over_cached_pages(order) != expected).any(axis=1)
    for index in (0, -1):
        different[index] |= (trial.with_the_query(order[[index]]) != expected[index]).any()
    if different.any():
        raise ConfigError(
            f"--deterministic: on this machine the scores of {different.sum()} of {len(order)} "
            "items depend on the batch that they are in; another number of --threads may help"
        )


def _trial(backend: Backend) -> _Trial:
    """Return a trial of random tokens; the query is longer than one chunk if that fits a batch."""
    limits = backend.limits
    max_items = limits.max_tokens // 3  # tokens of all items together
    lengths = [
        length
        for length, so_far in zip(ITEM_LENGTHS, accumulate(ITEM_LENGTHS), strict=True)
        if so_far <= max_items and 2 * length <= limits.max_model_len
    ]
    longest = min(
        max_items, limits.max_model_len - max(lengths), limits.deterministic_chunk * 5 // 4
    )
    rng = np.random.default_rng(0)

    def tokens(count: int) -> Int32Array:
        return rng.integers(0, limits.vocab_rows, count).astype(np.int32)

    labels = rng.integers(0, limits.label_rows, 3).astype(np.int32)

    others = tuple(tokens(1 + index % 5) for index in range(len(lengths) + 1))
    items = tuple(map(tokens, lengths))
    return _Trial(backend, tokens(longest), items, others=others, labels=labels)
