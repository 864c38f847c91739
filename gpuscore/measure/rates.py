"""Tables of times: a scenario's modes and servers, with rates, latencies, ratios and cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpuscore.measure.figures import PERCENTILES, Row
from gpuscore.measure.intervals import FEWEST, LEVEL, Interval, median, ratio
from gpuscore.measure.report import ResultTable, filled
from gpuscore.measure.scenarios import SCENARIOS
from gpuscore.measure.workload import TEXT

UNIT = 500  # tables show the time of so many items, as the reports do
ABOUT = (
    f"(medians; in brackets {LEVEL:.0%} intervals by bootstrap over at least {FEWEST} repeats; "
    '"none": a difference within the noise)'
)


def tables(rows: Sequence[Row], prices: Mapping[str, float]) -> list[ResultTable]:
    """Return a table for each scenario and shape, in the order of the rows.

    With several servers, the others are relative to the first.

    Args:
        prices: dollars per hour, by the server's name.
    """
    first = rows[0].server if rows else ""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.scenario, row.shape), []).append(row)
    tables = [_table(key, group, prices, first) for key, group in groups.items()]
    if tables:
        tables[-1] = replace(tables[-1], notes=[*tables[-1].notes, ABOUT])
    return tables


def _table(
    key: tuple[str, str], rows: list[Row], prices: Mapping[str, float], first: str
) -> ResultTable:
    scenario, shape = key
    known = SCENARIOS[scenario]
    columns = _COLUMNS["all" if scenario == TEXT else "loads" if known.loads else "items"]
    others: dict[tuple[str, str | None], Row]
    others = {(row.server, row.way): row for row in rows if row.error is None}
    head = ["mode", "server", *columns, f"over {known.base}", f"against {first}"]
    head += ["$ per million items", "items per $"]
    lines_of: list[list[str]] = []
    notes: list[str] = []
    for row in rows:
        cells = [row.way, row.server, *_cells(row, columns)]
        cells.append(change_text(improvement(row, others.get((row.server, known.base)))))
        cells.append(change_text(against(row, others.get((first, row.way)))))
        lines_of.append([*cells, *_cost(row, prices.get(row.server))])
        said = row.notes if row.error is None else (row.error, *row.notes)
        notes += [f"{row.way}, {row.server}: {note}" for note in said]
    return filled(f"{scenario}: {shape} ({known.source})", head, lines_of, notes)


_ITEMS = ("items/s", "ms per item", f"s for {UNIT}")
_LATENCIES = ("average ms", *(f"P{p} ms" for p in PERCENTILES), "refused", "late ms")
# Columns of scenarios that measure items/s, of those that measure latencies, and of --input.
_COLUMNS = {
    "items": _ITEMS,
    "loads": ("requests/s", "items/s", *_LATENCIES),
    "all": (*_ITEMS, "requests/s", *_LATENCIES),
}


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    if row.error is not None:
        return ["-"] * len(columns)
    known = {
        "items/s": f"{row.rate:,.4g}",
        "ms per item": _number(1e3 / row.rate.value),
        f"s for {UNIT}": _number(UNIT / row.rate.value),
        "requests/s": _number(row.requests_per_second),
        "average ms": _number(row.average),
        **{f"P{percent} ms": _number(row.percentile(percent)) for percent in PERCENTILES},
        "refused": str(row.refused),
        "late ms": _number(row.late),
    }
    return [known[column] for column in columns]


def _cost(row: Row, price: float | None) -> list[str]:
    rate = row.rate.value if row.rates else math.nan
    if price is None or math.isnan(rate):
        return ["-", "-"]
    return [f"{price / 3600 / rate * 1e6:.4g}", f"{rate * 3600 / price:,.0f}"]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def improvement(row: Row, base: Row | None) -> Interval | None:
    """Return the median ratio of a mode's rate to its base's, over rounds that measured both."""
    if base is None or base is row or not row.rates:
        return None
    pairs = zip(row.rates, base.rates, strict=False)
    return median(np.array([rate / other for rate, other in pairs]))


def against(row: Row, first: Row | None) -> Interval | None:
    """Return the ratio of two servers' median rates; None without rates."""
    if first is None or first is row or not row.rates or not first.rates:
        return None
    return ratio(np.array(row.rates), np.array(first.rates))


def change_text(change: Interval | None) -> str:
    """Return a ratio as text: "none" if its interval contains 1."""
    if change is None or math.isnan(change.value):
        return "-"
    if math.isnan(change.low):
        return f"{change.value:.2f}x (under {FEWEST} repeats)"
    if change.low <= 1 <= change.high:
        return f"none ({change.low:.2f}x to {change.high:.2f}x)"
    return f"{change.value:.2f}x ({change.low:.2f} to {change.high:.2f})"
