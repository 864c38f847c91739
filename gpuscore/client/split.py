"""Splitting a long list over the bodies of several requests.

Every element is encoded once; a body is put together when it is sent.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuscore.config import RequestLimits

MAX_ITEMS = RequestLimits().max_items
# The server takes 16 MiB and, by default, a million tokens; a byte is at most one token.
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """The limits of one request; an element larger than `max_bytes` is sent alone.

    Raises:
        ValueError: a limit is less than 1.
    """

    max_items: int
    max_bytes: int

    def __post_init__(self) -> None:
        if self.max_items < 1 or self.max_bytes < 1:
            raise ValueError("max_items_per_request and max_bytes_per_request must be at least 1")


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object with fields that all requests share, and lists that are split together.

    Args:
        shared: the fields.
        lists: elements as JSON; all of one length.
        is_object: the elements are pairs of name and value, and a list is an object.
    """

    shared: Mapping[str, Any]
    lists: Mapping[str, Sequence[bytes]]
    is_object: bool = False

    def parts(self, limits: SplitLimits) -> Iterator[tuple[int, int]]:
        """Yield the range of elements of each request; one empty range if there are none."""
        left = limits.max_bytes - len(self._head())
        start, size = 0, 0
        sizes = [sum(map(len, row)) + len(row) for row in zip(*self.lists.values(), strict=True)]
        for i, element in enumerate(sizes):
            if i > start and (i - start == limits.max_items or size + element > left):
                yield start, i
                start, size = i, 0
            size += element
        yield start, len(sizes)

    def encode(self, start: int, stop: int) -> bytes:
        """Return the body with the elements of a range."""
        pattern = b"%s:{%s}" if self.is_object else b"%s:[%s]"
        lists = [
            pattern % (as_json(name), b",".join(elements[start:stop]))
            for name, elements in self.lists.items()
        ]
        head = self._head()
        return b"{" + b",".join([*([head] if head else []), *lists]) + b"}"

    def _head(self) -> bytes:
        return as_json(self.shared)[1:-1]


def as_json(value: object) -> bytes:
    """Encode as JSON; raise UnicodeEncodeError for a lone surrogate, ValueError for NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()
