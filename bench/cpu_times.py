"""Times of scorers on one workload, in turn, each round on fresh tokens; see `cpu.py`."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from ceiling import operations, rates
from scenarios import Request, Workload
from spent import Spent

# Scores requests one after the other and says what that took.
Run: TypeAlias = Callable[[Sequence[Request]], Spent]


@dataclass(frozen=True)
class Timed:
    """A scorer to be timed.

    Args:
        run: scores requests.
        items: it scores this many of a workload's items, and its time is extrapolated; None = all.
    """

    run: Run
    items: int | None = None


def measure(
    scorers: Mapping[str, Timed],
    shape: Mapping[str, Any],
    dtype: torch.dtype,
    workload: Workload,
    repeat: int,
) -> dict[str, Any]:
    """Time all scorers in turn, `repeat` times; ratios are those to the first one's times.

    Returns:
        rows of the table, the floor of each round, and the share of it that the first one reaches.
    """
    count = workload.num_items * workload.requests
    per_item: dict[str, list[Spent]] = {name: [] for name in scorers}
    floors = []
    for turn in range(repeat):
        requests = dataclasses.replace(workload, seed=100 + turn).draw_all(shape["vocab_size"])
        floors.append(floor(shape, dtype, workload))
        print(f"  floor: {floors[-1]['seconds']:.2f} s {floors[-1]}", flush=True)
        for name, scorer in scorers.items():
            some = _first(requests, scorer.items)
            taken = scorer.run(some).of(sum(len(items) for _, items in some))
            per_item[name].append(taken)
            wall, cpu = taken.wall * count, taken.cpu * count
            print(f"  {name}: {wall:.2f} s, CPU {cpu:.2f} s for {count} items", flush=True)
    ours = next(iter(per_item.values()))
    least = [  # all threads are busy
        Spent(f["seconds"], f["seconds"] * torch.get_num_threads()).of(count) for f in floors
    ]
    shares = [f.wall / taken.wall for f, taken in zip(least, ours, strict=True)]
    return {
        "floors": floors,
        "of the floor": round(statistics.median(shares), 3),
        "rows": [row("floor of this machine", least, ours, count)]
        + [row(name, times, ours, count) for name, times in per_item.items()],
    }


def _first(requests: Sequence[Request], items: int | None) -> Sequence[Request]:
    """Return the first requests, with at least one and at most `items` items together."""
    if items is None:
        return requests
    query, first = requests[0]
    if len(first) >= items:
        return [(query, first[:items])]
    return requests[: items // len(first)]


def row(name: str, taken: list[Spent], ours: list[Spent], count: int) -> dict[str, Any]:
    """Return medians for `count` items, and medians of the rounds' ratios, of times per item."""
    pairs = [*zip(taken, ours, strict=True)]
    return {
        "scorer": name,
        "items/s": round(1 / statistics.median(t.wall for t in taken), 2),
        "CPU s": round(statistics.median(t.cpu for t in taken) * count, 2),
        "time / gpuscore's": round(statistics.median(t.wall / o.wall for t, o in pairs), 2),
        "CPU / gpuscore's": round(statistics.median(t.cpu / o.cpu for t, o in pairs), 2),
    }


def floor(shape: Mapping[str, Any], dtype: torch.dtype, workload: Workload) -> dict[str, float]:
    """Return the seconds of the counted operations at rates measured now, and those rates."""
    counted = operations(shape, workload.query_len, workload.num_items, workload.item_len)
    measured = rates(shape, dtype, workload.query_len)
    found = {f"{kind} TFLOP/s": round(rate / 1e12, 3) for kind, rate in measured.items()}
    seconds = sum(counted[kind] / measured[kind] for kind in counted)
    return found | {"seconds": workload.requests * seconds}
