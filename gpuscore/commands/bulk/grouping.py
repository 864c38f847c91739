"""Grouping of sorted rows into requests."""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from gpuscore.commands.bulk.rows import TextRow

GROUP_ROWS, GROUP_BYTES = 2048, 2**20  # most rows and bytes of text of one request
# Bytes, a few pages of tokens: neighbours go into separate requests if prompts on one side begin
# alike for that much longer, so that each request's prompts share all of it.
WORTHWHILE = 256
_END = TextRow(b"", b"", -1)


def grouped(
    rows: Iterable[TextRow],
    most_rows: int = GROUP_ROWS,
    free_cut: bool = True,
    cached: bool = True,
) -> Iterator[list[TextRow]]:
    """Yield neighbouring rows whose prompts go into one request: those of one first text, or, to
    save requests, rows of which each has a first text of its own.

    Args:
        rows: in order.
        most_rows: of one group.
        free_cut: a request's prompts share all that they begin with, not only what their first text
            alone determines; then rows of several first texts may be put together.
        cached: what prompts share is kept for the next requests, so neighbours may be separated.
    """
    group: list[TextRow] = []
    size = before = here = 0  # bytes shared with the row before, for the last row and for this one
    last, singles = _END, False  # the row before, and whether the group's first texts differ
    for row, following in pairwise(chain(rows, [_END])):
        after = _shared(row, following) if free_cut and cached else 0
        single = free_cut and row.first not in (last.first, following.first)
        length = len(row.rest) + (len(row.first) if single else 0)
        if group:
            fits = row.first == last.first or (single and singles)
            full = len(group) == most_rows or size + length > GROUP_BYTES
            if not fits or full or here + WORTHWHILE <= max(before, after):
                yield group
                group, size = [], 0
        group.append(row)
        singles, size = single, size + length
        last, before, here = row, here, after
    if group:
        yield group


def _shared(one: TextRow, two: TextRow) -> int:
    """Return the bytes with which two prompts begin alike; few count as none."""
    if two is _END:
        return 0
    if one.first != two.first:
        return _alike(one.first, two.first)
    return len(one.first) + _alike(one.rest, two.rest)


def _alike(a: bytes, b: bytes) -> int:
    if a[:WORTHWHILE] != b[:WORTHWHILE]:
        return 0
    least, most = 0, min(len(a), len(b)) + 1  # alike up to `least`, not up to `most`
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle)
    return least
