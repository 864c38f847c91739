"""A token that is not finite in some requests, and what the requests beside them get."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.types.batch import PackedBatch, Prefix, RowScores, Segment, pack, page_slots
from support.batches import NO_PAGES, Pages, int32, item_segments
from support.token_ids import random_ids

POISON, HARMLESS = 399, 398
LABELS = [3, 17]


def poisoned(directory: Path, target: Path, kind: str) -> Path:
    """Write a model in which POISON's key ("k"), value ("v") or both ("kv") are not finite.

    The first layer makes them so, by one column of its projections that is 0 for other tokens.
    """
    shutil.copytree(directory, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][POISON, 0] = 1e3
    for side in kind:
        weights[f"model.layers.0.self_attn.{side}_proj.weight"][:, 0] = 1e38
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def batches(token: int, page_size: int) -> tuple[PackedBatch, PackedBatch]:
    """Return two batches, with `token` in a query behind its first page, in an item, and alone.

    The first batch has requests with the token in their query, without it, and with nothing else in
    their query. The second has items of these requests, whose queries are cached; a request that
    continues the first one's first page; and two requests without a query, the first with the
    token in an item.
    """
    rng = np.random.default_rng(3)
    shuffled = Pages.shuffled(np.random.default_rng(4), 24, page_size)
    pages = [shuffled.of(request, 2 * page_size) for request in range(3)]
    queries = [random_ids(rng, page_size + count) for count in (4, 1)]
    queries[0][page_size + 3] = token
    queries.append([token] * 3)  # some operators take a row of NaN for one without keys
    items = [[random_ids(rng, count) for count in (1, 1, 3)] for _ in range(9)]
    segments: list[Segment] = []
    for request, query in enumerate(queries):
        slots, parent = page_slots(pages[request], 0, len(query), page_size), len(segments)
        segments.append(Segment(int32(query), 0, request, slots=slots))
        segments += item_segments(items[request], len(query), request, parent, LABELS)
    first = pack(segments, [Prefix(0, own) for own in pages])
    segments, prefixes = [], []
    for request, query in enumerate(queries):
        prefixes.append(Prefix(len(query), pages[request]))
        segments += item_segments(items[3 + request], len(query), request, -1, LABELS)
    prefixes.append(Prefix(page_size, pages[0]))
    segments.append(Segment(int32(queries[1][:5]), page_size, 3))
    segments += item_segments(items[6], page_size + 5, 3, len(segments) - 1, LABELS)
    items[7][0] = [token]
    for request in (4, 5):
        prefixes.append(Prefix(0, NO_PAGES))
        segments += item_segments(items[3 + request], 0, request, -1, LABELS)
    return first, pack(segments, prefixes)


# Of each batch's rows, those that see the token, and those of a request that has it elsewhere.
SEE = ([0, 1, 2, 6, 7, 8], [0, 1, 2, 6, 7, 8, 12])
BESIDE = ([], [13, 14])


def check_neighbours(config: ModelConfig) -> None:
    """Check that rows that see the token are not finite, and that others are as without it.

    With `deterministic` they have the same bits.
    """
    backend = create_backend(plan_backend(Path(config.model), config))
    try:
        page_size = backend.limits.page_size
        clean, poisoned = (
            [by_row(backend.collect(backend.extend(batch))) for batch in batches(token, page_size)]
            for token in (HARMLESS, POISON)
        )
    finally:
        backend.close()
    for got, expected, see, beside in zip(poisoned, clean, SEE, BESIDE, strict=True):
        assert np.isfinite(expected).all()
        assert not np.isfinite(got[see]).any()
        others = np.setdiff1d(np.arange(len(got)), [*see, *beside])
        tolerance = 0 if config.deterministic else 1e-5
        np.testing.assert_allclose(got[others], expected[others], rtol=0, atol=tolerance)


def by_row(scores: RowScores) -> np.ndarray:
    """Return the logits of a row's labels and its log-sum-exp, [N, 3]."""
    assert scores.lse is not None
    return np.column_stack((scores.label_logits.reshape(-1, len(LABELS)), scores.lse))
