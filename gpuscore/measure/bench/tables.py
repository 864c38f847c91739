"""Tables of results: a scenario's ways and servers, with rates, latencies, ratios and cost."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.measure.bench.figures import PERCENTILES, Row, change_text
from gpuscore.measure.bench.scenarios import SCENARIOS
from gpuscore.measure.intervals import FEWEST, LEVEL, RESAMPLES, Interval

DIVIDED = ("sequential", "single")
UNIT = 500  # items, whose time is shown, as in the reports


@dataclass(frozen=True, slots=True)
class ScenarioTable:
    """A table of one scenario, as text."""

    title: str
    head: tuple[str, ...]
    lines: list[tuple[str, ...]]
    notes: list[str]

    def markdown(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.lines]
        cells = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join([f"## {self.title}", cells, *self.notes])


def tables(
    rows: Sequence[Row], prices: Mapping[str, float], first: str | None
) -> list[ScenarioTable]:
    """Return a table for each scenario and shape, in the order of the rows.

    Args:
        rows: of one or several bundles.
        prices: per hour, by the server's name.
        first: the server that others are relative to; None leaves the column out.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.scenario, row.shape), []).append(row)
    return [_table(*key, some, prices, first) for key, some in groups.items()]


def _table(
    scenario: str, shape: str, rows: list[Row], prices: Mapping[str, float], first: str | None
) -> ScenarioTable:
    known = SCENARIOS.get(scenario)
    loads = known is not None and known.loads
    columns = _COLUMNS["loads" if loads else "items" if known is not None else "all"]
    if any(row.asked for row in rows):
        columns = (*columns, "late ms")
    head = ["way", "server", *columns]
    based = any(row.base for row in rows)
    head += [f"over {next(row.base for row in rows if row.base)}"] if based else []
    head += [f"against {first}"] if first is not None else []
    head += ["$ per million items", "items per $"] if prices else []
    lines = []
    for row in rows:
        cells = [row.way, row.server, *(_cell(column, row) for column in columns)]
        cells += [change_text(row.improvement)] if based else []
        if first is not None:
            first_rows = [r for r in rows if (r.server, r.way) == (first, row.way)]
            cells.append(
                change_text(against(row, first_rows[0]))
                if first_rows and row.server != first
                else "-"
            )
        cells += _cost(row, prices.get(row.server)) if prices else []
        lines.append(tuple(cells))
    source = f" ({known.source})" if known is not None else ""
    return ScenarioTable(f"{scenario}: {shape}{source}", tuple(head), lines, list(_notes(rows)))


_ITEMS = ("items/s", "ms per item", f"s for {UNIT}")
_LATENCIES = ("average ms", *(f"P{p} ms" for p in PERCENTILES), "refused")
# Of scenarios whose result is a rate of items, of those whose result are latencies, of one's own.
_COLUMNS = {
    "items": _ITEMS,
    "loads": ("requests/s", "items/s", *_LATENCIES),
    "all": (*_ITEMS, "requests/s", *_LATENCIES),
}


def _percentile(percent: float) -> Callable[[Row], str]:
    return lambda row: _number(row.percentile(percent))


_CELLS: dict[str, Callable[[Row], str]] = {
    "items/s": lambda row: f"{row.rate:,.4g}" if row.rates else "-",
    "ms per item": lambda row: _number(1e3 / row.rate.value),
    f"s for {UNIT}": lambda row: _number(UNIT / row.rate.value),
    "requests/s": lambda row: _number(row.requests_per_second),
    "average ms": lambda row: _number(row.average),
    **{f"P{p} ms": _percentile(p) for p in PERCENTILES},
    "refused": lambda row: str(row.refused),
    "late ms": lambda row: _number(row.late),
}


def _cell(column: str, row: Row) -> str:
    return "-" if row.error is not None else _CELLS[column](row)


def _cost(row: Row, price: float | None) -> list[str]:
    rate = row.rate.value if row.rates else math.nan
    if price is None or math.isnan(rate):
        return ["-", "-"]
    return [f"{price / 3600 / rate * 1e6:.4g}", f"{rate * 3600 / price:,.0f}"]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the notes on single rows, and once each note on all rows of a server."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            yield f"{row.way}, {row.server}: {row.error}"
        notes = list(row.notes)
        if row.requests < row.of and row.error is None:
            rest = "; the later ones tell the time of the others" if row.way in DIVIDED else ""
            notes.insert(0, f"{row.requests:,} of {row.of:,} requests{rest}")
        for note in notes:
            said.setdefault((row.server, note), []).append(row.way)
    for (server, note), ways in said.items():
        every = [row.way for row in rows if row.server == server]
        yield f"{server}{'' if ways == every else ', ' + ' and '.join(ways)}: {note}"


def against(row: Row, first: Row) -> Interval | None:
    """Return the ratio of two servers' median rates, with an interval of unpaired resamples."""
    if not row.rates or not first.rates:
        return None
    rates, first_rates = np.array(row.rates), np.array(first.rates)
    value = float(np.median(rates) / np.median(first_rates))
    if min(len(rates), len(first_rates)) < FEWEST:
        return Interval(value)
    rng = np.random.default_rng(0)
    ratios = [
        np.median(rng.choice(rates, len(rates)))
        / np.median(rng.choice(first_rates, len(first_rates)))
        for _ in range(RESAMPLES)
    ]
    return Interval.of(value, np.array(ratios))


ABOUT = (
    f"(medians; in brackets {LEVEL:.0%} intervals by bootstrap over at least {FEWEST} repeats; "
    '"none": a difference within the noise)'
)
