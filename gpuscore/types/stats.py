"""Counters and state of an engine, as it reports them."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since an engine started; they only grow."""

    batches: int  # collected
    computed_tokens: int
    cached_tokens: int  # tokens of prompts that were found in the prefix cache
    evicted_pages: int  # cached pages that were overwritten by others
    oom_retried: int  # batches that ran out of memory and whose work was scheduled again
    oom_failed: int  # batches of the smallest size that ran out of memory: their requests failed
    nonfinite_rows: int  # rows with NaN or infinity; an item is tried twice before it fails
    batch_items: int  # scored rows
    evicted_states: int = 0  # cached states that were overwritten by others

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        names = [item.name for item in fields(self)]
        return EngineCounters(**{n: getattr(self, n) + getattr(other, n) for n in names})


NO_COUNTERS = EngineCounters(*(0,) * 8)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine now, and its counters."""

    requests: int  # admitted and not yet answered
    tokens: int  # of those requests
    pages_free: int
    pages_cached: int  # not in use, but the prefix cache can still find their content
    pages_used: int
    tokens_per_second: float  # while working, smoothed
    # Like `tokens_per_second`, but only over batches that are at least a quarter full, because
    # small ones use a small part of the device. 0 before the first such batch.
    capacity: float
    counters: EngineCounters
    restarts: int = 0  # of its process; the counters continue after a restart
    heartbeat_age: float = 0.0  # seconds since its process last gave a sign of life
    tokens_left: int = 0  # of `tokens`, those that are neither computed nor cached
    running: int = 0  # of `requests`, those that have been in a batch
    states_free: int = 0  # slots for states of linear layers, like the pages above
    states_cached: int = 0
    states_used: int = 0

    @property
    def pages_ratio(self) -> float:
        """The share of the pages in use."""
        pages = self.pages_free + self.pages_cached + self.pages_used
        return self.pages_used / max(1, pages)


NO_STATS = EngineStats(*(0,) * 7, counters=NO_COUNTERS)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica, as the server sees it."""

    replica: str  # its number, from 0
    device: str  # as in --devices
    alive: bool
    stats: EngineStats  # only counters and restarts count while it is not alive
    rerun: int = 0  # requests that were in flight when it was lost, and were run again elsewhere
    model: str = ""  # the served name
