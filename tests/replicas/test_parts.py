"""Promise: a divided request's results are put together to the whole request's results."""

import numpy as np
from msgspec.structs import replace

from gpuscore.processes.replicas.flight import join, split
from gpuscore.types.request import LabelTrie, ScoreRequest, ScoreResult, Timings


def request_of(rng, count, every=False):
    items = tuple(rng.integers(0, 99, n).astype(np.int32) for n in rng.integers(1, 30, count))
    labels = tuple(
        rng.integers(0, 99, len(item) if every else 2).astype(np.int32) for item in items
    )
    query = rng.integers(0, 99, 7).astype(np.int32)
    request = ScoreRequest(
        query, items, labels, True, num_top=1, salt="s", deadline=3.0, every_position=every
    )
    return replace(request, query_labels=query + 1) if every and rng.random() < 0.7 else request


def scored(request):
    """Return a result whose numbers tell which item, row and label they belong to."""
    query = () if request.query_labels is None else (request.query_ids,)
    lse = np.concatenate(
        [
            *query,
            *(item if request.every_position else item[-1:] for item in request.item_ids),
        ]
    ).astype(np.float32)
    logits = tuple(ids.astype(np.float32) for ids in request.row_labels)
    timings = Timings(0.1, 0.2, float(len(request.item_ids)))
    top = np.column_stack((lse, lse + 1))
    tops = (top.astype(np.int32), top)
    return ScoreResult(logits, lse, *tops, request.num_tokens, timings)


def test_parts_together_are_the_whole():
    rng = np.random.default_rng()
    for _ in range(300):
        request = request_of(rng, int(rng.integers(2, 40)), bool(rng.integers(2)))
        sizes = rng.integers(1, 200, int(rng.integers(1, 9))).tolist()
        parts = split(request, sizes)
        assert 1 <= len(parts) <= len(sizes)
        assert all(len(part.item_ids) for part in parts)
        for index, part in enumerate(parts):
            assert part.query_labels is (None if index else request.query_labels)
            whole = replace(
                part,
                item_ids=request.item_ids,
                label_ids=request.label_ids,
                query_labels=request.query_labels,
            )
            for name in request.__struct_fields__:  # the deadline and the salt, too
                assert getattr(whole, name) is getattr(request, name)
        together, expected = join([scored(part) for part in parts]), scored(request)
        assert [row.tolist() for row in together.label_logits] == [
            row.tolist() for row in expected.label_logits
        ]
        for name in ("lse", "top_ids", "top_logits"):
            np.testing.assert_array_equal(
                getattr(together, name), getattr(expected, name), strict=True
            )
        query = len(request.query_ids)
        assert together.computed_tokens == request.num_tokens + query * (len(parts) - 1)
        assert together.timings.device == max(len(part.item_ids) for part in parts)


def test_parts_have_about_the_wanted_sizes():
    rng = np.random.default_rng()
    request = request_of(rng, 2000)
    total = sum(map(len, request.item_ids))
    sizes = [total // 2, total // 4, total - total // 2 - total // 4]
    for part, size in zip(split(request, sizes), sizes, strict=True):
        assert abs(sum(map(len, part.item_ids)) - size) <= 30


def test_what_was_not_asked_for_stays_away():
    request = replace(request_of(np.random.default_rng(), 9), need_lse=False, num_top=0)
    bare = [
        replace(scored(part), lse=None, top_ids=None, top_logits=None)
        for part in split(request, [20, 20])
    ]
    together = join(bare)
    assert together.lse is together.top_ids is together.top_logits is None


def test_every_part_has_the_labels_of_several_tokens():
    rng, trie = np.random.default_rng(1), LabelTrie(((5, 6), (5, 7), (8,)))
    request = request_of(rng, 9)
    labels = (trie.first_ids,) * len(request.item_ids)
    request = replace(request, label_ids=labels, num_top=0, trie=trie)
    parts = split(request, [50, 50, 50])
    assert len(parts) == 3
    assert all(part.trie is trie for part in parts)
    assert sum(part.num_label_tokens for part in parts) == request.num_label_tokens == 9
    computed = sum(part.num_tokens for part in parts)
    assert computed == request.num_tokens + 2 * len(request.query_ids)
