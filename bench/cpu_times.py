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
        precision: of its linear layers, and so of the floor that it is compared with; "full" or
            "int8".
    """

    run: Run
    items: int | None = None
    precision: str = "full"


def measure(
    scorers: Mapping[str, Timed],
    shape: Mapping[str, Any],
    dtype: torch.dtype,
    workload: Workload,
    repeat: int,
) -> dict[str, Any]:
    """Time all scorers in turn, `repeat` times; ratios compare a scorer with the first scorer.

    Returns:
        rows of the table, the floors of each round, and the share of its floor that the first
        scorer reaches.
    """
    count = workload.num_items * workload.requests
    per_item: dict[str, list[Spent]] = {name: [] for name in scorers}
    floors: dict[str, list[dict[str, float]]] = {s.precision: [] for s in scorers.values()}
    for turn in range(repeat):
        requests = dataclasses.replace(workload, seed=100 + turn).draw_all(shape["vocab_size"])
        for precision, floor_times in floors.items():
            floor_times.append(floor(shape, dtype, workload, precision))
            print(
                f"  floor, {precision}: {floor_times[-1]['seconds']:.2f} s {floor_times[-1]}",
                flush=True,
            )
        for name, scorer in scorers.items():
            some = _first(requests, scorer.items)
            taken = scorer.run(some).of(sum(len(items) for _, items in some))
            per_item[name].append(taken)
            wall, cpu = taken.wall * count, taken.cpu * count
            print(f"  {name}: {wall:.2f} s, CPU {cpu:.2f} s for {count} items", flush=True)
    times = next(iter(per_item.values())), count
    least = {precision: _least(times_of, count) for precision, times_of in floors.items()}
    rows = [row(_floor_name(precision), *times, own, own) for precision, own in least.items()]
    for name, taken in per_item.items():
        rows.append(row(name, *times, taken, least[scorers[name].precision]))
    return {"floors": floors, "of the floor": rows[len(floors)]["of the floor"], "rows": rows}


def _floor_name(precision: str) -> str:
    return f"floor of this machine{'' if precision == 'full' else f', {precision}'}"


def _least(floors: list[dict[str, float]], count: int) -> list[Spent]:
    """Return the least seconds per item by each floor, with all threads busy."""
    threads = torch.get_num_threads()
    return [Spent(f["seconds"], f["seconds"] * threads).of(count) for f in floors]


def _first(requests: Sequence[Request], items: int | None) -> Sequence[Request]:
    """Return the first requests, with at least one and at most `items` items together."""
    if items is None:
        return requests
    query, first = requests[0]
    if len(first) >= items:
        return [(query, first[:items])]
    return requests[: items // len(first)]


def row(
    name: str, ours: list[Spent], count: int, taken: list[Spent], least: list[Spent]
) -> dict[str, Any]:
    """Return medians for `count` items, and medians of the rounds' ratios, of times per item."""
    pairs = [*zip(taken, ours, strict=True)]
    shares = [f.wall / t.wall for f, t in zip(least, taken, strict=True)]
    return {
        "scorer": name,
        "items/s": round(1 / statistics.median(t.wall for t in taken), 2),
        "CPU s": round(statistics.median(t.cpu for t in taken) * count, 2),
        "time / gpuscore's": round(statistics.median(t.wall / o.wall for t, o in pairs), 2),
        "CPU / gpuscore's": round(statistics.median(t.cpu / o.cpu for t, o in pairs), 2),
        "of the floor": round(statistics.median(shares), 3),
    }


def floor(
    shape: Mapping[str, Any], dtype: torch.dtype, workload: Workload, precision: str
) -> dict[str, float]:
    """Return the seconds of the counted operations at rates measured now, and those rates."""
    counted = operations(shape, workload.query_len, workload.num_items, workload.item_len)
    measured = rates(shape, dtype, workload.query_len, precision)
    shown = {f"{kind} TFLOP/s": round(rate / 1e12, 3) for kind, rate in measured.items()}
    seconds = sum(counted[kind] / measured[kind] for kind in counted)
    return shown | {"seconds": workload.requests * seconds}
