"""A request on its way through the scheduler, and what of it went into a batch."""

from collections import deque
from dataclasses import dataclass, field

from gpuscore.arrays import Int32Array
from gpuscore.batch import PackedBatch
from gpuscore.engine.pages import PageKey
from gpuscore.request import ScoreRequest


@dataclass(slots=True, eq=False)
class Job:
    """What of a request has been handed out; `short` and `long` hold the items that have not.

    A short item fits a batch. A long one runs in chunks, the first of `long` at a time.
    """

    request: ScoreRequest
    order: tuple[int, int]  # (priority, arrival)
    short: deque[int] = field(default_factory=deque)
    long: deque[int] = field(default_factory=deque)
    long_done: int = 0  # tokens of long[0] handed out, the query's last part page included
    retried: set[int] = field(default_factory=set)  # long items whose row was not finite
    query_done: int = 0  # tokens of the query handed out
    query_pages: Int32Array | None = None  # None until the job has its pages
    item_pages: Int32Array | None = None  # for long items
    keys: tuple[PageKey, ...] | None = None  # of the query's full pages; made when first needed
    lacks: bytes = b""  # digest of the first page that was not found when it wanted to start
    published: int = 0  # of those pages, how many others can find
    active: bool = False  # in the scheduler's ring
    removed: bool = False
    deficit: int = 0  # tokens that it may still take, see Scheduler
    running: list["Share"] = field(default_factory=list)  # in batches that are not collected
    epoch: int = 0  # grows when handed-out work is taken back

    @property
    def cut(self) -> int:
        return len(self.request.query_ids)

    @property
    def exhausted(self) -> bool:
        return self.query_done == self.cut and not self.short and not self.long


@dataclass(slots=True, eq=False)
class Share:
    """What one batch computes for one job."""

    job: Job
    epoch: int
    query: tuple[int, int]  # part of the query, from and to; may be empty
    items: list[int] = field(default_factory=list)  # short items, in order
    long: tuple[int, int, int] | None = None  # item, from, to (as in `long_done`)
    long_ends: bool = False  # the chunk is the item's last; no other is scored, as a rule
    tokens: int = 0

    @property
    def scored(self) -> list[int]:
        """Items in the order of the share's scored rows."""
        every = self.job.request.every_position
        if self.long and (self.long_ends or every):
            return [*self.items, self.long[0]]
        return self.items

    @property
    def positions(self) -> list[tuple[int, int, int]]:
        """With every position scored: of each item the first one that is, and how many."""
        whole = [(item, 0, len(self.job.request.item_ids[item])) for item in self.items]
        if self.long is None:
            return whole
        item, start, stop = self.long
        return [*whole, (item, start, stop - start)]

    @property
    def num_rows(self) -> int:
        """Scored rows."""
        if self.job.request.every_position:
            return sum(count for _, _, count in self.positions)
        return len(self.scored)

    @property
    def valid(self) -> bool:
        """False once its work was taken back: the results mean nothing."""
        return self.epoch == self.job.epoch

    @property
    def pieces(self) -> int:
        """Parts that could have run in batches of their own."""
        return len(self.items) + (self.long is not None) + (self.query[1] > self.query[0])


@dataclass(frozen=True, slots=True)
class Work:
    """A batch and whose it is; scored rows are in the order of shares and their items."""

    batch: PackedBatch
    shares: tuple[Share, ...]
    alone: bool = False  # a single item, run again after it gave a non-finite row

    def is_minimal(self, min_tokens: int) -> bool:
        """Whether no smaller batch could make progress: one item, or a chunk of `min_tokens`."""
        if len(self.shares) > 1 or self.shares[0].pieces > 1:
            return False
        return bool(self.shares[0].items) or self.batch.num_tokens <= min_tokens
