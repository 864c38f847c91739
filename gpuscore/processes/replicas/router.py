"""The choice of a replica for a request: by its query's prefix, bounded by load.

A query's home is the replica with the highest hash of (replica, salt, first full pages of the
query): rendezvous hashing (Thaler and Ravishankar, 1998), so that when a replica is lost only its
own queries move, and several servers choose alike. A request stays at home if less than a batch of
tokens waits there, because it will then run in the next batch. Else it goes to the replica with the
shortest sum of the wait and, if its query was not sent there before, AGAIN times the time to
compute the query.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gpuscore.processes.worker.link import Report
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest

# Tokens of a query that choose its home: longer than most instructions, so that queries that share
# one are spread, and shorter than most histories, so that one that grows stays at home.
HOME_TOKENS = 1024
# To compute a query again takes time from all other requests, and waits are only estimates. With 1
# instead of 3, skewed work took 4 % longer (bench/LOG.md).
AGAIN = 3
# An item list is split if each part has at least a batch of tokens; and tokens of the query, which
# every part computes, times this number while the replicas have other work.
BUSY_SHARE = 10


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a replica that is ready.

    Args:
        replica: its number.
        tokens: number that it has still to compute.
        rate: tokens that it computes per second; 0 while unknown.
    """

    replica: int
    tokens: int
    rate: float


@dataclass(slots=True)
class InFlight:
    """Tokens sent to a replica and not answered, less the tokens that it reports as computed.

    The engine gives its requests equal shares, so many requests end at the same time: their tokens
    alone would not tell whether a replica has just begun or is nearly done.
    """

    tokens: int = 0  # of all parts in flight
    _reports: int = 0  # seen so far
    _since: int = 0  # tokens sent since the last one

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._since += tokens

    def remove(self, tokens: int) -> None:
        self.tokens -= tokens

    def left(self, report: Report) -> int:
        """Return the tokens that are probably left to compute, by the engine's last report."""
        if report.number != self._reports:
            self._reports, self._since = report.number, 0
        left = report.tokens_left + self._since
        return min(self.tokens, left)


class Router:
    """Chooses replicas; single-threaded.

    Args:
        limits: of every replica.
        prefix_cache: False if the replicas keep no prefixes, so that requests have no home.
    """

    def __init__(self, limits: BackendLimits, prefix_cache: bool = True) -> None:
        self._limits, self._prefix_cache = limits, prefix_cache
        self._sent: dict[int, Sent] = {}  # by replica
        self._turn = 0  # decides between equal waits

    def choose(self, request: ScoreRequest, loads: Sequence[Load]) -> Load:
        """Return the replica for a whole request.

        Args:
            loads: the replicas that are ready, at least one.
        """
        home = self._home(request, loads)
        if home is not None and home.tokens < self._limits.max_tokens:
            return home
        key = self._key(request)
        ends = [
            (load.tokens + AGAIN * self._again(key, request, load)) / _rate(load, loads)
            for load in loads
        ]
        soonest = min(ends)
        equal = [load for load, end in zip(loads, ends, strict=True) if end == soonest]
        if home in equal:
            return home
        self._turn += 1
        return equal[self._turn % len(equal)]

    def divide(self, request: ScoreRequest, loads: Sequence[Load]) -> list[tuple[Load, int]]:
        """Return the replicas that shall share a request's items, with tokens of items for each.

        All are expected to end at the same time. No part is so short that to compute the query once
        more would take longer than the part saves.
        """
        first = self.choose(request, loads)
        work = request.num_tokens - len(request.query_ids)
        chosen = [(first, work)]
        if len(request.item_ids) < 2 or work < 2 * self._limits.max_tokens:
            return chosen
        others = sorted(
            (load for load in loads if load is not first),
            key=lambda load: load.tokens / _rate(load, loads),
        )
        for count in range(1, len(others) + 1):
            parts = self._level(request, [first, *others[:count]], loads)
            if any(size < self._least_part(load, request) for load, size in parts):
                break
            chosen = parts
        return chosen

    def sent(self, request: ScoreRequest, replica: int) -> int:
        """Note that a request goes to a replica; return the tokens that it will compute there."""
        key = self._key(request)
        again = self._again(key, request, replica)
        if key is not None:
            size = self._full(request)
            room = self._limits.num_pages * self._limits.page_size
            self._sent.setdefault(replica, Sent(room)).add(key, size)
        return request.num_tokens - self._full(request) + again

    def lost(self, replica: int) -> None:
        """Note that a replica has lost its prefix cache."""
        self._sent.pop(replica, None)

    def _level(
        self, request: ScoreRequest, replicas: list[Load], loads: Sequence[Load]
    ) -> list[tuple[Load, int]]:
        """Fill the replicas to the same end time: each first does its own work, then the query."""
        key, rest = self._key(request), len(request.query_ids) - self._full(request)
        work = request.num_tokens - len(request.query_ids)
        rates = [_rate(load, loads) for load in replicas]
        busy = [load.tokens + rest + self._again(key, request, load) for load in replicas]
        end = (work + sum(busy)) / sum(rates)
        sizes = [int(end * rate) - b for rate, b in zip(rates, busy, strict=True)]
        return list(zip(replicas, sizes, strict=True))

    def _least_part(self, load: Load, request: ScoreRequest) -> int:
        idle, query = load.tokens < self._limits.max_tokens, len(request.query_ids)
        return max(self._limits.max_tokens, query if idle else BUSY_SHARE * query)

    def _home(self, request: ScoreRequest, loads: Sequence[Load]) -> Load | None:
        key = home_digest(request, self._limits.page_size) if self._prefix_cache else None
        if key is None:
            return None
        return max(loads, key=lambda load: _weight(key, load.replica))

    def _again(self, key: bytes | None, request: ScoreRequest, where: Load | int) -> int:
        """Return the tokens of full pages that a replica would have to compute, not find cached."""
        sent = self._sent.get(where if isinstance(where, int) else where.replica)
        known = sent is not None and key is not None and key in sent
        return 0 if known else self._full(request)

    def _key(self, request: ScoreRequest) -> bytes | None:
        full = self._full(request)
        return _digest(request, full) if full and self._prefix_cache else None

    def _full(self, request: ScoreRequest) -> int:
        """Return the tokens of the query's full pages."""
        size = self._limits.page_size
        return len(request.query_ids) // size * size


class Sent:
    """The queries that a replica has probably cached: the latest ones that fit its pages.

    Args:
        room: tokens of all pages.
    """

    def __init__(self, room: int) -> None:
        self._room, self._tokens = room, 0
        self._queries: OrderedDict[bytes, int] = OrderedDict()  # key -> tokens, oldest first

    def __contains__(self, key: bytes) -> bool:
        return key in self._queries

    def add(self, key: bytes, tokens: int) -> None:
        self._tokens += tokens - self._queries.pop(key, 0)
        self._queries[key] = tokens
        while self._tokens > self._room:
            self._tokens -= self._queries.popitem(last=False)[1]


def home_digest(request: ScoreRequest, page_size: int) -> bytes | None:
    """Return a digest of the query's beginning, which tells its home; None without a full page."""
    pages = min(len(request.query_ids), HOME_TOKENS) // page_size
    return _digest(request, pages * page_size) if pages else None


def _rate(load: Load, loads: Sequence[Load]) -> float:
    """Return a replica's rate; while it is unknown, the fastest replica's rate, or 1 token/s."""
    return load.rate or max(other.rate for other in loads) or 1.0


def _digest(request: ScoreRequest, tokens: int) -> bytes:
    start = request.query_ids[:tokens].astype("<i4").tobytes()
    return blake2b(request.salt.encode() + b"\0" + start, digest_size=16).digest()


def _weight(key: bytes, replica: int) -> bytes:
    return blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()
