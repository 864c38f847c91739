"""Promise: the checker reports two accesses exactly if nothing orders them.

Random traces are compared with reachability in the graph of all orderings; those made by hand hold
what has no part in them.
"""

from itertools import combinations

import numpy as np
import pytest

from support.streams.checker import Checker, Span

MEMORY = Span(1, 0, 64)


def traced(*steps):
    """Run steps such as ("launch", "s", "write") and return the kinds of the findings."""
    checker = Checker()
    for step in steps:
        run(checker, *step)
    return [finding.kind for finding in checker.findings.values()]


def run(checker, what, *options):
    steps = {
        "launch": lambda stream, side, span=MEMORY, thread="t": checker.on_stream(
            thread, stream, f"a {side}", "", *sides(side, span)
        ),
        "host": lambda side, span=MEMORY, thread="t": checker.on_host(
            thread, f"a {side}", "", *sides(side, span)
        ),
        "record": lambda stream, event, thread="t": checker.record(thread, stream, event),
        "wait": lambda stream, event, thread="t": checker.wait(thread, stream, event),
        "synchronise": lambda stream=None, thread="t": checker.synchronise(thread, stream),
        "synchronise event": lambda event, thread="t": checker.synchronise_event(thread, event),
        "release": lambda thread, what: checker.release(thread, what),
        "acquire": lambda thread, what: checker.acquire(thread, what),
        "allocate": lambda stream, thread="t": checker.allocate(thread, stream, 1, 64, ""),
        "free": lambda stream, thread="t": checker.free(thread, stream, 1, ""),
        "hand back": lambda thread="t": checker.hand_back(thread, 7, [MEMORY], ""),
        "take": lambda: checker.take(7),
    }
    steps[what](*options)


def sides(side, span):
    return ([], [span]) if side == "write" else ([span], [])


LEFT, RIGHT, MIDDLE = Span(1, 0, 32), Span(1, 32, 64), Span(1, 16, 48)
STREAMS = "unordered on two streams"
READ_EARLY = "read before the copy to it has ended"
STAGING = "written while a copy from it is in flight"
RETURNED = "used after it was handed back"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # the kinds, and memory of which random traces have none
        ([("launch", "a", "write"), ("launch", "b", "read")], [STREAMS]),
        ([("launch", "a", "write"), ("launch", "b", "write", Span(2, 0, 64))], []),
        ([("launch", "a", "write"), ("launch", "b", "write", Span(1, 8, 8))], []),
        ([("launch", "a", "write"), ("host", "read")], [READ_EARLY]),
        ([("launch", "a", "write"), ("synchronise",), ("host", "read")], []),
        ([("launch", "a", "read"), ("host", "write")], [STAGING]),
        (
            [("host", "write"), ("host", "read", MEMORY, "u")],
            ["unordered in two threads"],
        ),
        (
            [("host", "write"), ("launch", "a", "read", MEMORY, "u")],
            ["unordered between thread and stream"],
        ),
        # handovers, which are rare there
        (
            [
                ("host", "write"),
                ("release", "t", "task"),
                ("acquire", "u", "task"),
                ("host", "read", MEMORY, "u"),
            ],
            [],
        ),
        (
            [
                ("release", "t", "task"),
                ("host", "write"),
                ("acquire", "u", "task"),
                ("host", "read", MEMORY, "u"),
            ],
            ["unordered in two threads"],
        ),
        # the allocator
        ([("allocate", "a"), ("launch", "a", "write")], []),
        ([("allocate", "a"), ("launch", "b", "write")], ["used before its stream may use it"]),
        (
            [("allocate", "a"), ("record", "a", 1), ("wait", "b", 1), ("launch", "b", "write")],
            [],
        ),
        (
            [("record", "a", 1), ("launch", "a", "read", Span(2, 0, 1)), ("allocate", "a")]
            + [("wait", "b", 1), ("launch", "b", "write")],
            ["used before its stream may use it"],
        ),
        ([("allocate", "a"), ("launch", "a", "write"), ("free", "a")], []),
        (
            [("allocate", "a"), ("record", "a", 1), ("wait", "b", 1), ("launch", "b", "write")]
            + [("free", "a")],
            ["released while in use"],
        ),
        (
            [("allocate", "a"), ("record", "a", 1), ("wait", "b", 1), ("launch", "b", "write")]
            + [("record", "b", 2), ("wait", "a", 2), ("free", "a")],
            [],
        ),
        (
            [("allocate", "a"), ("record", "a", 1), ("wait", "b", 1), ("launch", "b", "write")]
            + [("synchronise", "b"), ("free", "a")],
            [],
        ),
        # buffers that are handed from batch to batch
        ([("launch", "a", "read"), ("hand back",)], ["handed back while in use"]),
        ([("launch", "a", "read"), ("synchronise", "a"), ("hand back",)], []),
        ([("allocate", "a"), ("hand back",)], []),
        (
            [("allocate", "a"), ("hand back",), ("take",), ("launch", "b", "write")],
            ["used before its stream may use it"],
        ),
        ([("hand back",), ("host", "read")], [RETURNED]),
        ([("hand back",), ("take",), ("host", "read")], []),
    ],
)
def test_traces_made_by_hand(steps, expected):
    assert traced(*steps) == expected


def test_a_finding_names_both_operations():
    checker = Checker()
    checker.on_stream("engine", "a", "upload", "queues.py:82", [], [Span(3, 0, 64)])
    checker.on_stream("engine", "b", "embedding", "decoder.py:230", [Span(3, 8, 16)], [])
    (finding,) = checker.findings.values()
    assert str(finding) == (
        "unordered on two streams: bytes 8 to 16 of block 3\n"
        "    upload on a by thread engine (queues.py:82, operation 1)\n"
        "    embedding on b by thread engine (decoder.py:230, operation 2)"
    )


def test_what_is_ordered_is_counted():
    checker = Checker()
    for step in (
        ("launch", "a", "write"),
        ("record", "a", 1),
        ("wait", "b", 1),
        ("launch", "b", "read"),
        ("synchronise", "b"),
        ("host", "write"),
    ):
        run(checker, *step)
    assert not checker.findings
    assert checker.counts.ordered == {"stream before stream": 1, "stream before thread": 2}
    assert checker.counts.waits.total() == 3


THREADS, QUEUES = ("t", "u"), ("a", "b", "c")


def random_steps(rng):
    """Return a random trace of two threads and three streams over three ranges."""
    spans = (LEFT, RIGHT, MIDDLE)
    steps = []
    for _ in range(int(rng.integers(4, 30))):
        thread, stream = str(rng.choice(THREADS)), str(rng.choice(QUEUES))
        side, span = str(rng.choice(["read", "write"])), spans[rng.integers(3)]
        event = int(rng.integers(3))
        steps.append(
            [
                ("launch", stream, side, span, thread),
                ("launch", stream, side, span, thread),
                ("host", side, span, thread),
                ("record", stream, event, thread),
                ("wait", stream, event, thread),
                ("synchronise", stream, thread),
                ("synchronise event", event, thread),
                ("release", thread, "task"),
                ("acquire", thread, "task"),
            ][rng.integers(9)]
        )
    return steps


def orderings(steps):
    """Return for each step the earlier steps that directly come before it."""
    parents = [set() for _ in steps]
    last, events, handed = {}, {}, {}
    for now, (what, *options) in enumerate(steps):
        thread = options[0] if what in ("release", "acquire") else options[-1]
        on_stream = what in ("launch", "record", "wait")
        if thread in last:
            parents[now].add(last[thread])
        if on_stream and options[0] in last:
            parents[now].add(last[options[0]])
        if what == "synchronise" and options[0] in last:
            parents[now].add(last[options[0]])
        if what in ("wait", "synchronise event"):
            parents[now].add(events.get(options[1 if what == "wait" else 0], now))
        if what == "acquire":
            parents[now].add(handed.get("task", now))
        if what == "record":
            events[options[1]] = now
        if what == "release":
            handed["task"] = now
        # A launch orders the stream behind the thread, and not the thread behind the stream.
        last[options[0] if on_stream else thread] = now
    return parents


def first_race(steps):
    """Return the first step that conflicts with an earlier, unordered step, or None."""
    parents = orderings(steps)
    before = []
    for now, own in enumerate(parents):
        reached = set()
        for parent in own - {now}:
            reached |= before[parent] | {parent}
        before.append(reached)
    accesses = [
        (index, options[-3], options[-2])
        for index, (what, *options) in enumerate(steps)
        if what in ("launch", "host")
    ]
    racing = [
        second
        for (first, side, span), (second, other, overlapping) in combinations(accesses, 2)
        if "write" in (side, other)
        and span.start < overlapping.end
        and overlapping.start < span.end
        and first not in before[second]
    ]
    return min(racing, default=None)


def test_random_traces_agree_with_reachability():
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(300):
        steps = random_steps(rng)
        expected, checker, race = first_race(steps), Checker(), None
        for index, step in enumerate(steps):
            run(checker, *step)
            if checker.findings and race is None:
                race = index
        assert race == expected, steps
        outcomes.add(expected is None)
    assert outcomes == {True, False}
