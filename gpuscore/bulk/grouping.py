"""Grouping of sorted rows into requests."""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from gpuscore.bulk.rows import TextRow

GROUP_ROWS, GROUP_BYTES = 2048, 2**20  # most rows and bytes of text of one request
# Bytes, a few pages of tokens: rows whose first text is the same go into separate requests if their
# other texts begin alike for that much longer, so that each request's prompts share all of it.
WORTHWHILE = 256
_END = TextRow(b"", b"", -1)


def grouped(
    rows: Iterable[TextRow], most_rows: int = GROUP_ROWS, share_more: bool = True
) -> Iterator[list[TextRow]]:
    """Yield rows that follow one another and have the same first text.

    Args:
        rows: in order.
        most_rows: of one group.
        share_more: separate rows whose other texts begin with different long texts; of use only if
            the cut is where the prompts begin to differ, and if queries are cached.
    """
    group: list[TextRow] = []
    size = before = here = 0  # bytes shared with the row before, for the last row and for this one
    for row, following in pairwise(chain(rows, [_END])):
        after = _shared(row, following) if share_more else 0
        apart = here + WORTHWHILE <= max(before, after)
        full = len(group) == most_rows or size + len(row.rest) > GROUP_BYTES
        if group and (group[0].first != row.first or apart or full):
            yield group
            group, size = [], 0
        group.append(row)
        size += len(row.rest)
        before, here = here, after
    if group:
        yield group


def _shared(one: TextRow, two: TextRow) -> int:
    """Return the bytes with which the other texts of two rows begin alike; 0 if they are few."""
    a, b = one.rest, two.rest
    if a[:WORTHWHILE] != b[:WORTHWHILE] or one.first != two.first:
        return 0
    least, most = 0, min(len(a), len(b)) + 1  # alike up to `least`, not up to `most`
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if a[:middle] == b[:middle] else (least, middle)
    return least
