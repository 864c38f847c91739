"""The choice of a replica for a request: by the start of its query, bounded by load.

A query's home is the replica with the highest hash of (replica, salt, first full pages of the
query): rendezvous hashing (Thaler and Ravishankar, 1998), so that when a replica is lost only its
own queries move. A request leaves its home if the wait there is longer than the shortest wait by
more than it takes to compute the query's full pages again. Waits that differ by less than a batch
count as equal, because an engine computes what waits together. All values come from the caller, so
that several servers choose alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gpuscore.limits import BackendLimits
from gpuscore.request import ScoreRequest

# Tokens of a query that choose its home: longer than most instructions, so that queries that share
# one are spread, and shorter than most histories, so that one that grows stays at home.
HOME_TOKENS = 1024
# An item list is split if each part has at least a batch of tokens; and tokens of the query, which
# every part computes, times this number while the replicas have other work.
BUSY_SHARE = 10


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a replica that is ready.

    Args:
        replica: its number.
        tokens: of the requests that it has not answered yet.
        rate: tokens that it computes per second; 0 while unknown.
    """

    replica: int
    tokens: int
    rate: float


class Router:
    """Chooses replicas.

    Args:
        limits: of every replica.
        prefix_cache: False if the replicas keep no prefixes, so that requests have no home.
    """

    def __init__(self, limits: BackendLimits, prefix_cache: bool = True) -> None:
        self._limits, self._prefix_cache = limits, prefix_cache
        self._turn = 0  # decides between equal waits

    def choose(self, request: ScoreRequest, loads: Sequence[Load]) -> Load:
        """Return the replica for a whole request.

        Args:
            loads: the replicas that are ready, at least one.
        """
        home = self._home(request, loads)
        least = self._least(loads)
        if home is None or self._seconds(home, loads) - self._seconds(least, loads) > (
            self._patience(request) / self._rate(least, loads)
        ):
            return least
        return home

    def divide(self, request: ScoreRequest, loads: Sequence[Load]) -> list[tuple[Load, int]]:
        """Return the replicas that shall share a request's items, with tokens of items for each.

        They are filled to the same expected end, the home first; a part too short to pay for the
        query's second computation is not made.
        """
        first = self.choose(request, loads)
        query = len(request.query_ids)
        work = request.num_tokens - query
        if len(request.item_ids) < 2 or work < 2 * self._limits.max_tokens or len(loads) < 2:
            return [(first, work)]
        others = sorted(
            (load for load in loads if load is not first),
            key=lambda load: self._seconds(load, loads),
        )
        chosen = [(first, work)]
        for count in range(2, len(loads) + 1):
            parts = self._level([first, *others[: count - 1]], query, work, loads)
            if any(size < self._least_part(load, query) for load, size in parts):
                break
            chosen = parts
        return chosen

    def _level(
        self, replicas: list[Load], query: int, work: int, loads: Sequence[Load]
    ) -> list[tuple[Load, int]]:
        """Fill the replicas to the same end: each first does its own work, then the query."""
        rates = [self._rate(load, loads) for load in replicas]
        busy = [load.tokens + query for load in replicas]
        end = (work + sum(busy)) / sum(rates)
        sizes = [int(end * rate) - b for rate, b in zip(rates, busy, strict=True)]
        return list(zip(replicas, sizes, strict=True))

    def _least_part(self, load: Load, query: int) -> int:
        idle = load.tokens < self._limits.max_tokens
        return max(self._limits.max_tokens, query if idle else BUSY_SHARE * query)

    def _home(self, request: ScoreRequest, loads: Sequence[Load]) -> Load | None:
        size = self._limits.page_size
        pages = min(len(request.query_ids), HOME_TOKENS) // size
        if not pages or not self._prefix_cache:
            return None
        start = request.query_ids[: pages * size].astype("<i4").tobytes()
        key = blake2b(request.salt.encode() + b"\0" + start, digest_size=16).digest()
        return max(loads, key=lambda load: _weight(key, load.replica))

    def _patience(self, request: ScoreRequest) -> int:
        """Return the tokens by which the wait at home may be longer than elsewhere."""
        size = self._limits.page_size
        return len(request.query_ids) // size * size + self._limits.max_tokens

    def _least(self, loads: Sequence[Load]) -> Load:
        waits = [self._seconds(load, loads) for load in loads]
        shortest = min(waits)
        equal = [load for load, wait in zip(loads, waits, strict=True) if wait == shortest]
        self._turn += 1
        return equal[self._turn % len(equal)]

    def _seconds(self, load: Load, loads: Sequence[Load]) -> float:
        return load.tokens / self._rate(load, loads)

    @staticmethod
    def _rate(load: Load, loads: Sequence[Load]) -> float:
        """Return a replica's rate; while it is unknown, the fastest one's, or 1 token/s."""
        return load.rate or max(other.rate for other in loads) or 1.0


def _weight(key: bytes, replica: int) -> bytes:
    return blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()
