"""Random packed batches, and the same prompts in different layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuscore.types.batch import PackedBatch, Prefix, Rows, Segment, pack, page_slots
from gpuscore.types.request import Readouts

NO_PAGES = np.empty(0, dtype=np.int32)


def int32(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True)
class Pages:
    """The pages of a pool in a shuffled order, handed out to requests."""

    order: np.ndarray
    page_size: int

    @classmethod
    def shuffled(cls, rng: np.random.Generator, num_pages: int, page_size: int) -> "Pages":
        return cls(int32(rng.permutation(num_pages)), page_size)

    def of(self, request: int, length: int, room: int = 8) -> np.ndarray:
        """Return pages for `length` tokens of a request (at most `room` pages each)."""
        count = -(-length // self.page_size)
        return self.order[request * room : request * room + count]


def item_segments(
    items: Sequence[Sequence[int]],
    start: int,
    prefix: int,
    parent: int,
    labels: Sequence[int],
    need_lse: bool = True,
) -> list[Segment]:
    return [
        Segment(
            int32(item), start, prefix, parent=parent, label_ids=int32(labels), need_lse=need_lse
        )
        for item in items
    ]


def every_token(items: Sequence[Sequence[int]], query_labels: Sequence[int] = ()) -> Readouts:
    """Return read-outs of every token of these items, each for one label."""
    return Readouts.of([Rows.every(int32(ids)) for ids in (query_labels, *items)])


def in_one_batch(
    query: Sequence[int], items: Sequence[Sequence[int]], labels: Sequence[int]
) -> PackedBatch:
    """Return a batch with the query as its items' parent; nothing is cached and nothing kept."""
    parent = [Segment(int32(query), 0, 0)] if len(query) else []
    segments = item_segments(items, len(query), 0, 0 if parent else -1, labels)
    return pack(parent + segments, [Prefix(0, NO_PAGES)])


def query_chunks(query: Sequence[int], bounds: Sequence[int], pages: np.ndarray, size: int):
    """Yield batches that only fill pages: query[0:b1], query[b1:b2], ..."""
    for start, stop in zip([0, *bounds[:-1]], bounds, strict=True):
        slots = page_slots(pages, start, stop, size)
        yield pack(
            [Segment(int32(query[start:stop]), start, 0, slots=slots)], [Prefix(start, pages)]
        )


def random_batch(rng: np.random.Generator, num_slots: int, page_size: int) -> PackedBatch:
    """Return a batch of requests with and without cached prefix, query part and items, of odd
    lengths.

    Every row of some items is scored.
    """
    segments: list[Segment] = []
    prefixes: list[Prefix] = []
    pages = Pages.shuffled(rng, num_slots // page_size, page_size)
    for request in range(4):
        cached = int(rng.choice([0, 0, 1, page_size, 29]))
        query_len = int(rng.choice([0, 1, 7, 63]))
        prefixes.append(Prefix(cached, pages.of(request, cached + query_len, room=24)))
        parent = -1
        if query_len:
            parent = len(segments)
            slots = page_slots(prefixes[-1].pages, cached, cached + query_len, page_size)
            keep = None if rng.random() < 0.5 else slots
            segments.append(
                Segment(int32(rng.integers(0, 9, query_len)), cached, request, slots=keep)
            )
        lengths = rng.choice([1, 2, 3, 5, 8, 20, 21, 111], int(rng.integers(0, 9)))
        items = [rng.integers(0, 9, n).tolist() for n in lengths]
        segments += item_segments(items, cached + query_len, request, parent, [1])
        segments += continuations(rng, segments, len(items))
    segments = [
        replace(s, rows=Rows.every(s.token_ids)) if len(s.label_ids) and rng.random() < 0.3 else s
        for s in segments
    ]
    return pack(_reordered(segments, preorder(rng, [s.parent for s in segments])), prefixes)


def continuations(
    rng: np.random.Generator, segments: Sequence[Segment], items: int
) -> list[Segment]:
    """Return segments that continue some of the last `items` segments, and each other."""
    tree = list(segments)
    for _ in range(int(rng.choice([0, 0, 1, 4])) if items else 0):
        parent = int(rng.integers(len(segments) - items, len(tree)))
        above, length = tree[parent], int(rng.choice([1, 1, 2, 5, 17, 40]))
        tree.append(replace(above, token_ids=int32(rng.integers(0, 9, length)), parent=parent))
        tree[-1] = replace(tree[-1], start=above.start + len(above.token_ids))
    return tree[len(segments) :]


def preorder(rng: np.random.Generator, parents: Sequence[int]) -> list[int]:
    """Return the segments of trees in a preorder in which siblings are shuffled."""
    children: dict[int, list[int]] = {}
    for index in rng.permutation(len(parents)).tolist():
        children.setdefault(parents[index], []).append(index)
    order, waiting = [], list(children.get(-1, []))
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])
    return order


def _reordered(segments: list[Segment], order: Sequence[int]) -> list[Segment]:
    """Return the same segments in another order, with parents renumbered."""
    place = {old: new for new, old in enumerate(order)}
    place[-1] = -1
    return [replace(segments[i], parent=place[segments[i].parent]) for i in order]
