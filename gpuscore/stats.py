"""What an engine counts, and what it says of itself."""

from dataclasses import dataclass, fields

# Upper bounds of the sizes that `SizeCounts` tells apart.
BATCH_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


BATCH_ITEMS = (0, 1, 3, 10, 30, 100, 300, 1000, 3000)  # 0: nothing but a chunk of something longer


@dataclass(frozen=True, slots=True)
class SizeCounts:
    """How many of each size there were; `counts` has one more than there are bounds."""

    counts: tuple[int, ...]
    total: int  # of all sizes

    def __add__(self, other: "SizeCounts") -> "SizeCounts":
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return SizeCounts(counts, self.total + other.total)


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has done so far. These only grow; ValueError for wrong numbers of counts."""

    batches: int  # collected
    computed_tokens: int
    cached_tokens: int  # of prompts, that the prefix cache held
    evicted_pages: int  # cached pages given up for others
    oom_retried: int  # batches that ran out of memory, their work handed out again ...
    oom_failed: int  # ... or, at the smallest size, given up with its request
    nonfinite_rows: int  # computed; an item is computed twice before its request fails
    batch_tokens: SizeCounts
    batch_items: SizeCounts  # scored rows

    def __post_init__(self) -> None:
        for sizes, bounds in ((self.batch_tokens, BATCH_TOKENS), (self.batch_items, BATCH_ITEMS)):
            if len(sizes.counts) != len(bounds) + 1:
                raise ValueError(f"{len(sizes.counts)} counts for {len(bounds)} bounds")

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        names = [item.name for item in fields(self)]
        return EngineCounters(**{n: getattr(self, n) + getattr(other, n) for n in names})


NO_COUNTERS = EngineCounters(
    *(0,) * 7,
    batch_tokens=SizeCounts((0,) * (len(BATCH_TOKENS) + 1), 0),
    batch_items=SizeCounts((0,) * (len(BATCH_ITEMS) + 1), 0),
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing, and has done."""

    requests: int  # admitted and not yet answered
    tokens: int  # of those requests
    pages_free: int
    pages_cached: int  # not in use, their content may be found again
    pages_used: int
    tokens_per_second: float  # while working, smoothed
    # The same of batches that are at least a quarter full, as all are when there is much to do: of
    # small ones a device computes a small part of what it can. 0 until there was one.
    capacity: float
    counters: EngineCounters
    restarts: int = 0  # of its process; the counters outlive them
    heartbeat_age: float = 0.0  # seconds since its process last gave a sign of life


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0.0, 0.0, NO_COUNTERS)
