"""Vector clocks: which accesses to memory are ordered, and which are not.

Threads and streams are actors. Each has a vector clock with one entry per actor, and each access
carries the time of its actor (its entry in its own clock). An access happens before another if the
other's clock has reached that time (Lamport 1978; Mattern 1989; FastTrack, PLDI 2009). Two accesses
conflict if they overlap and one of them writes.

Order comes from: a thread's program, a stream's queue, the launch itself (what a thread did comes
before what it launches next), events, synchronisation, and handovers between threads. Nothing here
depends on how long anything takes: two accesses that are unordered are reported even if they never
met in this run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

ALLOCATION = "allocation"
Clock: TypeAlias = list[int]  # one entry per actor; missing entries are 0


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of one allocation."""

    block: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"bytes {self.start} to {self.end} of block {self.block}"


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that reads or writes memory, as it is reported."""

    number: int
    name: str
    where: str  # line of the product
    thread: str
    stream: str | None  # None = the host

    def __str__(self) -> str:
        on = f"on {self.stream}" if self.stream else "on the host"
        return f"{self.name} {on} by thread {self.thread} ({self.where}, operation {self.number})"


@dataclass(frozen=True, slots=True)
class Finding:
    """Two accesses without order, or an access to memory that was handed back."""

    kind: str
    earlier: Operation
    later: Operation
    span: Span

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for findings that one defect makes again and again."""
        a, b = self.earlier, self.later
        return (self.kind, a.name, a.where, str(a.stream), b.name, b.where, str(b.stream))

    def __str__(self) -> str:
        return f"{self.kind}: {self.span}\n    {self.earlier}\n    {self.later}"


@dataclass(slots=True)
class _Access:
    start: int
    end: int
    actor: int
    time: int
    writes: bool
    operation: Operation


@dataclass(slots=True)
class Counts:
    """Amounts that show that a run checked something."""

    operations: int = 0
    launches: int = 0  # of them on streams
    waits: Counter[str] = field(default_factory=Counter)  # record, wait, synchronise, handover
    ordered: Counter[str] = field(default_factory=Counter)  # conflicting pairs, by pair of actors
    blocks: int = 0

    def add(self, other: "Counts") -> None:
        self.operations += other.operations
        self.launches += other.launches
        self.waits += other.waits
        self.ordered += other.ordered
        self.blocks += other.blocks


class Checker:
    """Vector clocks of all actors, and the last accesses to every block.

    Memory that the caching allocator hands out may have been used by work that its stream has still
    to do, and memory that is freed may be handed out at once for later work of that stream. So an
    allocation and a release count as writes to the whole block, at that point of the stream.
    """

    def __init__(self) -> None:
        self.findings: dict[tuple[str, ...], Finding] = {}
        self.repeated = 0  # findings that have the key of an earlier one
        self.counts = Counts()
        self._actors: dict[str, int] = {}
        self._clocks: list[Clock] = []
        self._is_stream: list[bool] = []
        self._events: dict[int, Clock] = {}
        self._handovers: dict[object, Clock] = {}
        self._accesses: dict[int, list[_Access]] = {}
        self._returned: dict[int, tuple[list[Span], Operation]] = {}
        self._numbers = 0

    # ---- accesses ----

    def on_host(
        self, thread: str, name: str, where: str, reads: Iterable[Span], writes: Iterable[Span]
    ) -> None:
        """Record an access by a thread, which is done when the call returns."""
        actor = self._actor(thread, stream=False)
        self.counts.operations += 1
        self._access(actor, self._operation(name, where, thread, None), reads, writes)

    def on_stream(
        self,
        thread: str,
        stream: str,
        name: str,
        where: str,
        reads: Iterable[Span],
        writes: Iterable[Span],
    ) -> None:
        """Record work that a thread puts into a stream's queue."""
        actor = self._launched(thread, stream)
        self.counts.operations += 1
        self.counts.launches += 1
        self._access(actor, self._operation(name, where, thread, stream), reads, writes)

    # ---- memory ----

    def allocate(self, thread: str, stream: str, block: int, size: int, where: str) -> None:
        """Record that the allocator hands out a block to a stream."""
        actor = self._actor(stream, stream=True)
        operation = self._operation(ALLOCATION, where, thread, stream)
        time = self._clocks[actor][actor]
        self._accesses[block] = [_Access(0, size, actor, time, True, operation)]
        self.counts.blocks += 1

    def free(self, thread: str, stream: str, block: int, where: str) -> None:
        """Record that the allocator gets a block of this stream back."""
        operation = self._operation("release", where, thread, stream)
        known = _joined(
            self._clocks[self._actor(stream, stream=True)],
            self._clocks[self._actor(thread, stream=False)],
        )
        for access in self._accesses.pop(block, ()):
            if not _reached(known, access):
                span = Span(block, access.start, access.end)
                self._found("released while in use", access.operation, operation, span)

    def forget(self, block: int) -> None:
        """Drop a block that nothing will use again."""
        self._accesses.pop(block, None)

    def hand_back(self, thread: str, key: int, spans: Sequence[Span], where: str) -> None:
        """Record that a thread gives memory to the next batch; every use has to be over."""
        actor = self._actor(thread, stream=False)
        operation = self._operation("handing back", where, thread, None)
        for span in spans:
            for access in self._accesses.get(span.block, ()):
                in_use = access.actor != actor and access.operation.name != ALLOCATION
                if in_use and not _reached(self._clocks[actor], access):
                    self._found("handed back while in use", access.operation, operation, span)
        self._returned[key] = (list(spans), operation)

    def take(self, key: int) -> None:
        """Record that memory which was handed back is in use again."""
        self._returned.pop(key, None)

    # ---- order ----

    def record(self, thread: str, stream: str, event: int) -> None:
        actor = self._launched(thread, stream)
        self._events[event] = self._clocks[actor].copy()
        self.counts.waits["events recorded"] += 1

    def wait(self, thread: str, stream: str, event: int) -> None:
        """Let later work of a stream wait for an event; one that was never recorded is no wait."""
        actor = self._launched(thread, stream)
        self._join(actor, self._events.get(event, []))
        self.counts.waits["streams that waited"] += 1

    def synchronise_event(self, thread: str, event: int) -> None:
        self._join(self._actor(thread, stream=False), self._events.get(event, []))
        self.counts.waits["threads that waited for an event"] += 1

    def synchronise(self, thread: str, stream: str | None = None) -> None:
        """Let a thread wait for a stream, or for the whole device (None)."""
        actor = self._actor(thread, stream=False)
        names = [stream] if stream else [n for n, i in self._actors.items() if self._is_stream[i]]
        for name in names:
            self._join(actor, self._clocks[self._actor(name, stream=True)])
        self.counts.waits["threads that waited for a stream"] += 1

    def release(self, thread: str, handover: object) -> None:
        """Record that another thread may take over here (a task is queued, a result is set)."""
        actor = self._actor(thread, stream=False)
        self._handovers[handover] = self._clocks[actor].copy()

    def acquire(self, thread: str, handover: object) -> None:
        self._join(self._actor(thread, stream=False), self._handovers.get(handover, []))
        self.counts.waits["handovers between threads"] += 1

    @property
    def actors(self) -> Mapping[str, bool]:
        """Names of threads and streams, and which are streams."""
        return {name: self._is_stream[index] for name, index in self._actors.items()}

    # ---- inside ----

    def _actor(self, name: str, *, stream: bool) -> int:
        actor = self._actors.get(name)
        if actor is None:
            actor = self._actors[name] = len(self._clocks)
            self._clocks.append([0] * actor + [1])
            self._is_stream.append(stream)
            for clock in self._clocks[:actor]:
                clock.append(0)
        return actor

    def _launched(self, thread: str, stream: str) -> int:
        """Order what a thread launches behind what it did; return the stream."""
        actor = self._actor(stream, stream=True)
        self._join(actor, self._clocks[self._actor(thread, stream=False)])
        return actor

    def _join(self, actor: int, other: Clock) -> None:
        self._clocks[actor] = _joined(self._clocks[actor], other)

    def _operation(self, name: str, where: str, thread: str, stream: str | None) -> Operation:
        self._numbers += 1
        return Operation(self._numbers, name, where, thread, stream)

    def _access(
        self, actor: int, operation: Operation, reads: Iterable[Span], writes: Iterable[Span]
    ) -> None:
        clock = self._clocks[actor]
        clock[actor] += 1
        for spans, write in ((reads, False), (writes, True)):
            for span in spans:
                if span.end > span.start:
                    self._check_returned(operation, span)
                    self._check(actor, clock, operation, span, write)

    def _check(
        self, actor: int, clock: Clock, operation: Operation, span: Span, write: bool
    ) -> None:
        """Compare an access with the earlier ones to its block, and keep it beside them."""
        kept = []
        for old in self._accesses.get(span.block, ()):
            apart = old.end <= span.start or span.end <= old.start
            before = old.actor == actor or clock[old.actor] >= old.time
            if not apart and (write or old.writes) and old.actor != actor:
                if before:
                    self.counts.ordered[self._pair(old.actor, actor)] += 1
                else:
                    kind = self._kind(old, actor, write)
                    self._found(kind, old.operation, operation, span)
            covered = span.start <= old.start and old.end <= span.end
            # A later access that is unordered with `old` is then unordered with this one too.
            if not (before and covered and (write or not old.writes)):
                kept.append(old)
        kept.append(_Access(span.start, span.end, actor, clock[actor], write, operation))
        self._accesses[span.block] = kept

    def _check_returned(self, operation: Operation, span: Span) -> None:
        for spans, returned in self._returned.values():
            for own in spans:
                if own.block == span.block and own.start < span.end and span.start < own.end:
                    self._found("used after it was handed back", returned, operation, span)

    def _pair(self, first: int, second: int) -> str:
        names = ("thread", "stream")
        return f"{names[self._is_stream[first]]} before {names[self._is_stream[second]]}"

    def _kind(self, old: _Access, actor: int, write: bool) -> str:
        if old.operation.name == ALLOCATION:
            return "used before its stream may use it"
        first, second = self._is_stream[old.actor], self._is_stream[actor]
        if first and not second:
            copies = "written while a copy from it is in flight"
            return copies if write else "read before the copy to it has ended"
        if first and second:
            return "unordered on two streams"
        return "unordered between thread and stream" if second else "unordered in two threads"

    def _found(self, kind: str, earlier: Operation, later: Operation, span: Span) -> None:
        finding = Finding(kind, earlier, later, span)
        if finding.key in self.findings:
            self.repeated += 1
        self.findings.setdefault(finding.key, finding)


def _joined(clock: Clock, other: Clock) -> Clock:
    """Return the later of both times of each actor."""
    if len(clock) < len(other):
        clock, other = other, clock
    joined = [a if a > b else b for a, b in zip(clock, other, strict=False)]
    return joined + clock[len(other) :]


def _reached(clock: Clock, access: _Access) -> bool:
    return access.actor < len(clock) and clock[access.actor] >= access.time
