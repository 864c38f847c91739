"""Promise: a packed batch has the layout and the mask that were worked out by hand."""

import numpy as np

from gpuscore.types.batch import (
    Prefix,
    Rows,
    Segment,
    pack,
    page_slots,
    prefix_slots,
    visible_rows,
)
from support.batches import NO_PAGES, int32, random_batch


def test_a_batch_by_hand():
    pages = int32([5, 2])
    segments = [
        Segment(int32([10, 11]), 3, 0, slots=page_slots(pages, 3, 5, 4)),
        Segment(int32([12]), 5, 0, parent=0, label_ids=int32([7, 8]), need_lse=True),
        Segment(int32([13, 14, 15]), 5, 0, parent=0, label_ids=int32([7])),
        Segment(int32([16]), 0, 1, label_ids=int32([9])),
    ]
    batch = pack(segments, [Prefix(3, pages), Prefix(0, NO_PAGES)])
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert batch.positions.tolist() == [3, 4, 5, 5, 6, 7, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 7]
    assert batch.parent.tolist() == [-1, 0, 0, -1]
    assert batch.request_of.tolist() == [0, 0, 0, 1]
    assert batch.prefix_lens.tolist() == [3, 0]
    assert batch.page_table.tolist() == [[5, 2], [-1, -1]]
    assert batch.slot_mapping.tolist() == [5 * 4 + 3, 2 * 4 + 0, -1, -1, -1, -1, -1]
    assert batch.score_rows.tolist() == [2, 5, 6]
    assert batch.cu_labels.tolist() == [0, 2, 3, 4]
    assert batch.label_token_ids.tolist() == [7, 8, 7, 9]
    assert batch.need_lse.tolist() == [True, False, False]
    for name in batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == (np.bool_ if name == "need_lse" else np.int32), name


def test_every_row_of_a_segment():
    segments = [
        Segment(int32([10, 11]), 0, 0, label_ids=int32([7, 8])),
        Segment(int32([12, 13, 14]), 4, 0, rows=Rows.every(int32([1, 2, 3])), need_lse=True),
        Segment(int32([15]), 0, 0),
        Segment(int32([16]), 0, 0, rows=Rows.every(int32([9]))),
    ]
    batch = pack(segments, [Prefix(0, NO_PAGES)])
    assert batch.score_rows.tolist() == [1, 2, 3, 4, 6]
    assert batch.cu_labels.tolist() == [0, 2, 3, 4, 5, 6]
    assert batch.label_token_ids.tolist() == [7, 8, 1, 2, 3, 9]
    assert batch.need_lse.tolist() == [False, True, True, True, False]


def test_nothing_scored_is_legal():
    batch = pack([Segment(int32([1, 2]), 0, 0)], [Prefix(0, NO_PAGES)])
    assert batch.score_rows.tolist() == []
    assert batch.cu_labels.tolist() == [0]
    assert batch.label_token_ids.tolist() == []


def test_the_mask_rule_by_hand():
    pages = int32([5, 2])
    segments = [
        Segment(int32([1, 2]), 3, 0),  # the query's last part, behind three cached tokens
        Segment(int32([3, 4, 5]), 5, 0, parent=0),
        Segment(int32([9]), 8, 0, parent=1),  # continues the segment before
        Segment(int32([6]), 5, 0, parent=0),
        Segment(int32([7, 8]), 0, 1),  # of another request
    ]
    batch = pack(segments, [Prefix(3, pages), Prefix(0, NO_PAGES)])
    shown = ["".join(".#"[int(seen)] for seen in row) for row in visible_rows(batch)]
    assert shown == [
        "#........",
        "##.......",
        "###......",
        "####.....",
        "#####....",
        "######...",
        "##....#..",
        ".......#.",
        ".......##",
    ]
    assert prefix_slots(batch, 0, page_size=2).tolist() == [10, 11, 4]
    assert prefix_slots(batch, 1, page_size=2).tolist() == []


def test_the_mask_rule_row_by_row():
    for seed in range(10):
        batch = random_batch(np.random.default_rng(seed), 4096, 16)
        bounds, seen = batch.cu_seqlens, visible_rows(batch)
        for segment, parent in enumerate(batch.parent):
            for row in range(bounds[segment], bounds[segment + 1]):
                expected, above = set(range(bounds[segment], row + 1)), parent
                while above >= 0:
                    expected |= set(range(bounds[above], bounds[above + 1]))
                    above = batch.parent[above]
                assert set(np.flatnonzero(seen[row])) == expected
