"""Two small plots as SVG, drawn without a plotting library."""

from html import escape

import numpy as np

from gpuscore.types.arrays import Float64Array

WIDTH, HEIGHT, MARGIN = 340, 260, 46
_DECADES = range(-9, 2)  # of |d log p|; smaller differences are in the first bar
_FRAME = 'fill="none" stroke="#888"'


def histogram(differences: Float64Array, title: str) -> str:
    """Plot the number of log-probabilities per size of their difference, in half decades."""
    sizes = np.abs(differences[np.isfinite(differences)])
    edges = np.arange(_DECADES.start, _DECADES.stop + 0.5, 0.5)
    first, last = float(edges[0]), float(edges[-1])
    logs = np.log10(np.maximum(sizes, 10.0**first))
    counts, _ = np.histogram(np.clip(logs, first, last), bins=edges)
    most = max(1, int(counts.max()))
    parts = []
    wide = _span(0.5, first, last)
    for left, count in zip(edges[:-1].tolist(), counts.tolist(), strict=True):
        x = _at(left, first, last)
        tall = count / most * (HEIGHT - 2 * MARGIN)
        parts.append(
            f'<rect x="{x:.1f}" y="{HEIGHT - MARGIN - tall:.1f}" width="{wide - 1:.1f}" '
            f'height="{tall:.1f}" fill="#4477aa"><title>{count}</title></rect>'
        )
    ticks = [(_at(d, first, last), f"1e{d}") for d in _DECADES if d % 2]
    return _plot(title, "|d log p|", f"up to {most}", "".join(parts), ticks)


def scatter(want: Float64Array, got: Float64Array, title: str) -> str:
    """Plot each score of one run against the other's; equal scores are on the line."""
    both = np.isfinite(want) & np.isfinite(got)
    want, got = want[both], got[both]
    low, high = (
        (float(min(want.min(), got.min())), float(max(want.max(), got.max())))
        if want.size
        else (0.0, 1.0)
    )
    high = high if high > low else low + 1.0
    points = dict.fromkeys(
        (f"{_at(x, low, high):.1f}", f"{HEIGHT - _up(y, low, high):.1f}")
        for x, y in zip(want, got, strict=True)
    )
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="1.3"/>' for x, y in points)
    line = (
        f'<path d="M{MARGIN},{HEIGHT - MARGIN} L{WIDTH - MARGIN},{MARGIN}" stroke="#cc6677" '
        'fill="none"/>'
    )
    ticks = [(_at(value, low, high), f"{value:.1f}") for value in (low, high)]
    inner = f'{line}<g fill="#4477aa" fill-opacity="0.5">{dots}</g>'
    return _plot(title, "log p that counts as right", "log p", inner, ticks)


def _plot(title: str, x: str, y: str, inner: str, ticks: list[tuple[float, str]]) -> str:
    foot = HEIGHT - MARGIN
    labels = "".join(
        f'<text x="{at:.1f}" y="{foot + 14}" text-anchor="middle">{escape(text)}</text>'
        for at, text in ticks
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle" font-size="12">{escape(title)}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="{MARGIN}" y="{MARGIN - 8}">{escape(y)}</text>'
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH - 2 * MARGIN}" '
        f'height="{HEIGHT - 2 * MARGIN}" {_FRAME}/>{labels}{inner}</svg>'
    )


def _at(value: float, low: float, high: float) -> float:
    return MARGIN + _span(value - low, low, high)


def _span(length: float, low: float, high: float) -> float:
    return length / (high - low) * (WIDTH - 2 * MARGIN)


def _up(value: float, low: float, high: float) -> float:
    return MARGIN + (value - low) / (high - low) * (HEIGHT - 2 * MARGIN)
