"""A batch with which backends compare their attention at start, and the answer by the mask rule.

Kernels of libraries and compilers differ between versions and devices. A wrong mask or a misread
stride would change scores without an error.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpuscore.errors import ConfigError
from gpuscore.types.batch import (
    BoolArray,
    PackedBatch,
    Prefix,
    Segment,
    pack,
    page_slots,
    prefix_slots,
    visible_rows,
)

# Largest norm of the error over the norm of the answer; a correct kernel stays several times lower.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}

Exact: TypeAlias = NDArray[np.float64]

# Of a request: cached tokens, tokens of the query beside its items, lengths of the items.
Sizes: TypeAlias = tuple[int, int, tuple[int, ...]]
REQUESTS: tuple[Sizes, ...] = ((70, 0, (1, 9)), (0, 37, (3, 20)), (64, 6, (5,)))
CONTINUED = (3, 2)  # lengths of segments below the last item of each request, one below the other


def known_batch(page_size: int, requests: Sequence[Sizes] = REQUESTS) -> PackedBatch:
    """Build a batch of requests; every segment is scored, and the last query is kept."""
    room = max(-(-(cached + query) // page_size) for cached, query, _ in requests)
    pages = np.arange(len(requests) * room, dtype=np.int32)[::-1].reshape(len(requests), room)
    segments: list[Segment] = []
    for request, (cached, query, items) in enumerate(requests):
        parent = len(segments) if query else -1
        if query:
            slots = page_slots(pages[request], cached, cached + query, page_size)
            kept = slots if request == len(requests) - 1 else None
            segments.append(replace(_segment(query, cached, request), slots=kept))
        start = cached + query
        segments += [replace(_segment(n, start, request), parent=parent) for n in items]
        for length in CONTINUED if items else ():
            last = segments[-1]
            below = _segment(length, last.start + len(last.token_ids), request)
            segments.append(replace(below, parent=len(segments) - 1))
    prefixes = [Prefix(cached, own) for (cached, _, _), own in zip(requests, pages, strict=True)]
    return pack(segments, prefixes)


def by_the_rule(
    batch: PackedBatch,
    page_size: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    cached: Sequence[Exact],
    rows: Sequence[Exact],
) -> Exact:
    """Compute attention of one layer with an explicit mask, request by request.

    Args:
        batch, page_size, window, scale, softcap: what to compute.
        cached: keys and values by slot, [slots, Hkv, D].
        rows: q [T, H, D], k and v [T, Hkv, D].

    Returns:
        [T, H, D].
    """
    q, *new = rows
    request_of = np.repeat(batch.request_of, np.diff(batch.cu_seqlens))
    out, group = np.empty_like(q), q.shape[1] // new[0].shape[1]
    for request in range(len(batch.prefix_lens)):
        own = np.flatnonzero(request_of == request)
        slots = prefix_slots(batch, request, page_size)
        keys, values = (  # [H, keys, D]
            np.concatenate((before[slots], side[own])).repeat(group, axis=1).swapaxes(0, 1)
            for before, side in zip(cached, new, strict=True)
        )
        scores = q[own].swapaxes(0, 1) @ keys.swapaxes(1, 2) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores[:, ~request_mask(batch, own, len(slots), window)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out[own] = (weights @ values).swapaxes(0, 1)
    return out


def check_error(choice: str, where: str, error: float, allowed: float) -> None:
    """Raise ConfigError if a known answer's relative error is over `allowed`, or NaN."""
    if not error <= allowed:
        raise ConfigError(
            f"{choice} computes something else than the reference on this machine{where}: "
            f"the relative error of a known answer is {error:.1e}, allowed {allowed:.0e}; "
            f"choose another {choice.split()[0]}"
        )


def request_mask(batch: PackedBatch, own: np.ndarray, cached: int, window: int | None) -> BoolArray:
    """Return the mask of a request's rows, [rows, cached + rows]."""
    seen = visible_rows(batch)[np.ix_(own, own)]
    mask: BoolArray = np.concatenate((np.ones((len(own), cached), dtype=bool), seen), axis=1)
    if window is not None:
        positions = np.concatenate((np.arange(cached), batch.positions[own]))
        mask &= positions > batch.positions[own, None] - window
    return mask


def _segment(length: int, start: int, request: int) -> Segment:
    ids = np.zeros(length, np.int32)
    return Segment(ids, start, request, label_ids=ids[:1])
