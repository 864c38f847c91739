"""Plots of times as SVG, drawn without a plotting library."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

import numpy as np

from gpuscore.measure.intervals import Interval

_WIDTH, _MARGIN, _ROW = 620, 24, 26  # of a plot of runs, and its rows
_SIDE, _LEFT, _TOP, _BELOW = 220, 48, 34, 56  # of a plot of curves, and around it


_COLOURS = (
    *("#4477aa", "#cc6677", "#228833", "#b8860b", "#aa3377", "#66ccee", "#555555"),
    *("#332288", "#ee7733", "#44aa99", "#999933", "#000000"),
)


def bars(title: str, rows: Sequence[tuple[str, str, Interval]]) -> str:
    """Plot rates as bars from 0, with their 95 % intervals; names stand above: they are long.

    Args:
        title: of the plot.
        rows: of each bar its group, which chooses the colour, the rest of its name, and the rate.
    """
    groups = list(dict.fromkeys(group for group, _, _ in rows))
    ends = [
        v for _, _, interval in rows for v in (interval.high, interval.value) if not np.isnan(v)
    ]
    wide = _scale(0, max([*ends, 1e-9]), 0, _WIDTH - 4 * _MARGIN)
    parts, row = [], _ROW + 10
    for number, (group, name, interval) in enumerate(rows):
        y, colour = 40 + row * number, _COLOURS[groups.index(group) % len(_COLOURS)]
        end = max(v for v in (interval.high, interval.value) if not np.isnan(v))
        parts.append(_text(_MARGIN, y, f"{group}, {name}"))
        parts.append(
            f'<rect x="{_MARGIN}" y="{y + 4}" width="{wide(interval.value):.1f}" height="12" '
            f'fill="{colour}"/>'
        )
        if not np.isnan(interval.low):
            low, high = _MARGIN + wide(interval.low), _MARGIN + wide(interval.high)
            parts.append(_path(f"M{low:.1f},{y + 10} H{high:.1f}", "currentColor", 2))
        parts.append(_text(_MARGIN + wide(end) + 6, y + 14, f"{interval.value:,.4g}"))
    return _titled(title, 40 + row * len(rows), parts)


def lines(
    title: str, axes: tuple[str, str], series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Plot curves of points (x, y), each with its name below, on axes from 0."""
    width, height = _WIDTH, _SIDE + _TOP + _BELOW + 16 * len(series)
    points = [point for some in series.values() for point in some]
    most_x, most_y = (max(1e-9, *(p[i] for p in points)) for i in (0, 1))
    foot = _TOP + _SIDE
    at, up = _scale(0, most_x, _LEFT, width - _MARGIN), _scale(0, most_y, foot, _TOP + 10)
    parts = [_frame(_LEFT, _TOP, width - _MARGIN - _LEFT, _SIDE)]
    parts += [_text(at(v), foot + 14, f"{v:g}", "middle") for v in (0, most_x / 2, most_x)]
    parts += [
        _text(_LEFT - 4, up(v) + 4, f"{v:,.0f}" if v >= 100 else f"{v:.3g}", "end")
        for v in (0, most_y / 2, most_y)
    ]
    parts += [_text(width / 2, foot + 28, axes[0], "middle"), _text(_LEFT, _TOP - 4, axes[1])]
    for number, (name, some) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " L".join(f"{at(a):.1f},{up(b):.1f}" for a, b in sorted(some))
        below = foot + 46 + 16 * number
        parts += [_path(f"M{path}", colour, 2), _circle(_LEFT + 6, below - 4, 5, colour)]
        parts.append(_text(_LEFT + 16, below, name))
    return _titled(title, height, parts)


def _titled(title: str, height: float, parts: Iterable[str]) -> str:
    head = f'<text x="{_MARGIN}" y="16" font-weight="bold">{escape(title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" height="{height:g}" font-family="sans-serif" font-size="12" '
        'fill="currentColor">' + "\n".join([head, *parts]) + "</svg>"
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function from values between `low` and `high` to pixels."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(path: str, colour: str, width: float = 1) -> str:
    return f'<path d="{path}" stroke="{colour}" stroke-width="{width}" fill="none"/>'


def _frame(x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} fill="none" stroke="#888"/>'


def _circle(x: float, y: float, radius: float, colour: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
    return f'<circle {place} fill="{colour}" fill-opacity="0.8"/>'
