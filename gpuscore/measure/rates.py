"""Tables of times: a scenario's ways and servers, with rates, latencies, ratios and cost."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpuscore.measure.figures import PERCENTILES, Row
from gpuscore.measure.intervals import FEWEST, LEVEL, Interval, ratio
from gpuscore.measure.pages import ResultTable
from gpuscore.measure.scenarios import SCENARIOS

DIVIDED = ("sequential", "single")
UNIT = 500  # items, whose time is shown, as in the reports
ABOUT = (
    f"(medians; in brackets {LEVEL:.0%} intervals by bootstrap over at least {FEWEST} repeats; "
    '"none": a difference within the noise)'
)


def tables(rows: Sequence[Row], prices: Mapping[str, float]) -> list[ResultTable]:
    """Return a table for each scenario and shape, in the order of the rows.

    With several servers, the others are relative to the first.

    Args:
        rows: of one or several bundles.
        prices: per hour, by the server's name.
    """
    servers = list(dict.fromkeys(row.server for row in rows))
    first = servers[0] if len(servers) > 1 else None
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.scenario, row.shape), []).append(row)
    made = [_table(key, some, prices, first) for key, some in groups.items()]
    if made:
        made[-1] = replace(made[-1], notes=[*made[-1].notes, ABOUT])
    return made


def _table(
    key: tuple[str, str], rows: list[Row], prices: Mapping[str, float], first: str | None
) -> ResultTable:
    scenario, shape = key
    known = SCENARIOS.get(scenario)
    loads = known is not None and known.loads
    columns = _COLUMNS["loads" if loads else "items" if known is not None else "all"]
    if any(row.asked for row in rows):
        columns = (*columns, "late ms")
    head = ["way", "server", *columns]
    base = next((row.base for row in rows if row.base), None)
    head += [f"over {base}"] if base else []
    head += [f"against {first}"] if first is not None else []
    head += ["$ per million items", "items per $"] if prices else []
    lines_of = []
    for row in rows:
        cells = [row.way, row.server, *(_cell(column, row) for column in columns)]
        cells += [change_text(row.improvement)] if base else []
        if first is not None:
            others = [r for r in rows if (r.server, r.way) == (first, row.way)]
            change = against(row, others[0]) if others and row.server != first else None
            cells.append(change_text(change))
        cells += _cost(row, prices.get(row.server)) if prices else []
        lines_of.append(cells)
    source = f" ({known.source})" if known is not None else ""
    speeds = [row.requests_per_second if loads else row.rate.value for row in rows]
    shares = np.nan_to_num(np.array(speeds) / np.nanmax([*speeds, 1e-9])).tolist()
    title = f"{scenario}: {shape}{source}"
    return ResultTable(title, head, lines_of, list(_notes(rows)), names=2, bars=shares)


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
    """Return the ratio of two servers' median rates; None without rates."""
    if not row.rates or not first.rates:
        return None
    return ratio(np.array(row.rates), np.array(first.rates))


def change_text(change: Interval | None) -> str:
    """Return a ratio as text; "none" with the interval if that has 1 in it."""
    if change is None or math.isnan(change.value):
        return "-"
    if math.isnan(change.low):
        return f"{change.value:.2f}x (under {FEWEST} repeats)"
    if change.low <= 1 <= change.high:
        return f"none ({change.low:.2f}x to {change.high:.2f}x)"
    return f"{change.value:.2f}x ({change.low:.2f} to {change.high:.2f})"
