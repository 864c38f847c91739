"""Workloads that the benches share. Tokens are random and different in every run,
so that no cache and no repetition can help."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

import numpy as np

Request: TypeAlias = tuple[list[int], list[list[int]]]  # query, items; token ids


@dataclass(frozen=True)
class Workload:
    """Requests, one after the other, each of a shared query and items, lengths in tokens."""

    query_len: int
    num_items: int
    item_len: int
    seed: int = 0
    cached: int = 0  # number of first query tokens that are cached
    requests: int = 1

    def __str__(self) -> str:
        rest = self.query_len - self.cached
        query = f"{self.cached:,} cached + {rest:,}" if self.cached else f"{rest:,}"
        query = query.removesuffix(" + 0")
        shape = f"{query} + {self.num_items:,} x {self.item_len}"
        return shape if self.requests == 1 else f"{self.requests} requests of {shape}"

    def draw(self, vocab: int) -> Request:
        """Draw the first request."""
        return self._one(self._rng(), vocab)

    def draw_all(self, vocab: int) -> list[Request]:
        rng = self._rng()
        return [self._one(rng, vocab) for _ in range(self.requests)]

    def draws(self, vocab: int, seed: int) -> Iterator[Request]:
        """Draw requests without end, the first one of this workload with the next seed."""
        for number in count(seed + 1):
            yield replace(self, seed=number).draw(vocab)

    def _rng(self) -> np.random.Generator:
        # Queries of two workloads begin differently, or the second one's would be cached.
        return np.random.default_rng([self.seed, self.query_len, self.num_items, self.item_len])

    def _one(self, rng: np.random.Generator, vocab: int) -> Request:
        query = rng.integers(0, vocab, self.query_len).tolist()
        return query, rng.integers(0, vocab, (self.num_items, self.item_len)).tolist()


WORKLOADS = {
    "reports": Workload(2000, 500, 20),
    "hundred": Workload(500, 100, 20),
    "separate": Workload(120, 10, 180, requests=4),  # little is shared
    "single": Workload(280, 1, 20),  # nothing is shared
    "short": Workload(300, 16, 32),
}
