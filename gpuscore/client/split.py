"""A long list as the bodies of several requests. Elements are encoded once, bodies when they are
sent."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from gpuscore.client.results import Ids
from gpuscore.config import RequestLimits

MAX_ITEMS = RequestLimits().max_items
# The server takes 16 MiB and, by default, a million tokens, of which a byte makes one at most.
MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """Of one request; raises ValueError for less than 1. An element larger than `max_bytes` is
    sent alone."""

    max_items: int
    max_bytes: int

    def __post_init__(self) -> None:
        if self.max_items < 1 or self.max_bytes < 1:
            raise ValueError("max_items_per_request and max_bytes_per_request must be at least 1")


@dataclass(frozen=True, slots=True)
class Body:
    """An object whose fields are either shared by all requests or lists cut in step."""

    shared: Mapping[str, Any]
    lists: Mapping[str, Sequence[bytes]]  # elements as JSON; all of one length

    def parts(self, limits: SplitLimits) -> Iterator[tuple[int, int]]:
        """Ranges of elements, in order; one empty range if there are none."""
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
        """The body with the elements of a range."""
        lists = [
            b"%s:[%s]" % (as_json(name), b",".join(elements[start:stop]))
            for name, elements in self.lists.items()
        ]
        head = self._head()
        return b"{" + b",".join([*([head] if head else []), *lists]) + b"}"

    def _head(self) -> bytes:
        return as_json(self.shared)[1:-1]


def as_json(value: object) -> bytes:
    """Raises UnicodeEncodeError for text with half a surrogate pair, ValueError for NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def token_ids(ids: Ids) -> list[int]:
    """Plain integers of a list or a NumPy array; raises TypeError for anything else."""
    return [index(i) for i in (ids.tolist() if isinstance(ids, np.ndarray) else ids)]


def text_or_ids(value: str | Ids) -> str | list[int]:
    return value if isinstance(value, str) else token_ids(value)
