"""`Link`: times of collectives among cards, read between published measurements."""

import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any, Literal, TypeAlias

EXCHANGES = Path(__file__).with_name("exchanges.toml")
LARGE = 1 << 20  # bytes from which the error of large exchanges counts

Kind: TypeAlias = Literal["all-reduce", "all-gather"]
Points: TypeAlias = Sequence[tuple[float, float]]  # bytes and microseconds, by bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of all ranks: the bytes of each one's tensor, and how often a batch has it."""

    name: str
    kind: Kind
    bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    """Connection among the cards of a machine.

    Args:
        key: its name in the tables.
        tables: by kind of collective and number of ranks.
        checks: what others measured on such a link: kind, ranks, bytes and microseconds.
        sources: of both.
    """

    key: str
    tables: Mapping[tuple[str, int], Points] = field(default_factory=dict)
    checks: Sequence[tuple[str, int, float, float]] = ()
    sources: Sequence[str] = ()

    def us(self, one: Exchange, ranks: int) -> float:
        """Return the time of one collective; raises ValueError if it is not known for `ranks`."""
        if (points := self.tables.get((one.kind, ranks))) is None:
            known = sorted({known for _, known in self.tables})
            raise ValueError(f"{self.key}: no {one.kind} of {ranks} ranks; known: {known}")
        return between(points, one.bytes * (ranks if one.kind == "all-gather" else 1))

    def errors(self, large: bool) -> list[float]:
        """Return how far the tables are off what others measured, relative to it."""
        return [
            abs(between(self.tables[kind, ranks], size) / us - 1)
            for kind, ranks, size, us in self.checks
            if (size >= LARGE) == large
        ]


def between(points: Points, size: float) -> float:
    """Return the time at a size: on a line between the logarithms of both neighbours.

    Below the first point it is that point's time, and beyond the last one its bandwidth holds.
    """
    sizes = [one for one, _ in points]
    place = bisect_left(sizes, size)
    if place == 0:
        return points[0][1]
    if place == len(points):
        last, us = points[-1]
        return us * size / last
    (low, first), (high, second) = points[place - 1 : place + 1]
    share = log(size / low) / log(high / low)
    return exp(log(first) + share * log(second / first))


def read_links(path: Path = EXCHANGES) -> Mapping[str, Link]:
    """Read the links of a file by key."""
    with path.open("rb") as file:
        series = tomllib.load(file)["series"]
    keys = dict.fromkeys(row["link"] for row in series)
    return {key: _link(key, [row for row in series if row["link"] == key]) for key in keys}


def _link(key: str, rows: Sequence[Mapping[str, Any]]) -> Link:
    tables = {
        (row["kind"], row["ranks"]): [(size, us) for size, us in row["points"]]
        for row in rows
        if row["role"] == "table"
    }
    checks = [
        (row["kind"], row["ranks"], size, us)
        for row in rows
        if row["role"] == "check"
        for size, us in row["points"]
    ]
    return Link(key, tables, checks, tuple(dict.fromkeys(row["source"] for row in rows)))
