"""The page of bench/gpu_day.py: stages, predictions beside measurements, and tables of findings."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpuscore.measure.reports import table, write_html

Found = Mapping[str, Any]
Pair = tuple[str, tuple[float, float, float], float | None]  # name, predicted with bounds, measured
WIDTH, ROW, LEFT, RIGHT = 920, 34, 190, 90
PREDICTED, MEASURED = "#4477aa", "#cc6677"
BENCH = ("scorer", "workload", "sizes", "device ms", "wall ms", "items/s", "of floor", "met")
ATTENTION = ("workload", "cached", "way", "ms", "TFLOP/s", "relative error")


def write_page(folder: Path, found: Found) -> Path:
    """Write gpu-day.html into the folder and return its path."""
    stages = {
        name: about.get("found") for name, about in found["stages"].items() if "found" in about
    }
    bench, attention = stages.get("bench", {}), stages.get("attention", {})
    path = folder / "gpu-day.html"
    write_html(
        path,
        "gpu-day",
        [
            table(("", ""), [(name, escape(str(value))) for name, value in _facts(found)]),
            "<h2>Stages</h2>",
            table(("stage", "status", "seconds", ""), list(_statuses(found))),
            "<h2>Predicted and measured</h2>",
            bars(pairs(found.get("predictions", ()), bench.get("rows", ()))),
            "<h2>Bench</h2>",
            _rows(bench.get("rows", ()), BENCH),
            "<h2>Attention of one layer</h2>",
            _rows(attention.get("rows", ()), ATTENTION),
            table(("workload", "our fastest"), list(attention.get("fastest", {}).items())),
            "<h2>Row-wise kernels</h2>",
            _rows(stages.get("kernels", {}).get("kernels", ()), None),
            "<h2>Parity</h2>",
            *(
                f"<h3>{escape(name)}</h3><pre>{escape(chr(10).join(about['compared']))}</pre>"
                for name, about in stages.items()
                if name.startswith("parity")
            ),
        ],
    )
    return path


def pairs(predictions: Iterable[Found], rows: Iterable[Found]) -> list[Pair]:
    """Return the predictions with the measurements of our default backend, if there are any.

    Args:
        predictions: of bench/predict.py, in milliseconds.
        rows: of bench/gpu.py.
    """
    measured = {
        row["workload"]: row.get("device ms", row.get("wall ms"))
        for row in rows
        if row["scorer"] == "gpuscore"
    }
    return [
        (
            one["workload"],
            (one["low ms"], one["predicted ms"], one["high ms"]),
            measured.get(one["workload"]),
        )
        for one in predictions
    ]


def bars(found: Sequence[Pair]) -> str:
    """Draw two bars for each pair, with the prediction's interval as a line, as SVG."""
    if not found:
        return "<p>There are no predictions for this card.</p>"
    most = max(max(high, got or 0.0) for _, (_, _, high), got in found)
    scale = (WIDTH - LEFT - RIGHT) / most
    height = ROW * len(found) + 24
    parts = [_pair(place, pair, scale) for place, pair in enumerate(found)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" '
        f'font-family="sans-serif" font-size="12"><text x="{LEFT}" y="14">milliseconds: '
        f'<tspan fill="{PREDICTED}">predicted, with its interval</tspan>, '
        f'<tspan fill="{MEASURED}">measured</tspan></text>{"".join(parts)}</svg>'
    )


def _pair(place: int, pair: Pair, scale: float) -> str:
    name, (low, predicted, high), got = pair
    top = 24 + place * ROW
    shown = f"{predicted:.3g} ({low:.3g} to {high:.3g})"
    parts = [
        f'<text x="{LEFT - 8}" y="{top + 18}" text-anchor="end">{escape(name)}</text>',
        _bar(top, predicted * scale, PREDICTED, f"{shown} predicted"),
        f'<path d="M{LEFT + low * scale:.1f},{top + 6} H{LEFT + high * scale:.1f}" '
        'stroke="currentColor"/>',
    ]
    if got is not None:
        parts.append(_bar(top + 14, got * scale, MEASURED, f"{got:.3g} measured"))
    return "".join(parts)


def _bar(top: float, width: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="12" fill="{colour}">'
        f"<title>{title}</title></rect>"
    )


def _facts(found: Found) -> Iterable[tuple[str, Any]]:
    yield "date", found["date"]
    yield from found["about"].items()


def _statuses(found: Found) -> Iterable[tuple[str, ...]]:
    for name in found["planned"]:
        about = found["stages"].get(name, {"status": "not reached"})
        status = about["status"]
        shown = status if status == "done" else f'<span class="failed">{escape(status)}</span>'
        seconds, why = str(about.get("seconds", "")), escape(str(about.get("why", "")))
        yield escape(name), shown, seconds, f'<span class="text">{why}</span>'


def _rows(rows: Sequence[Found], names: Sequence[str] | None) -> str:
    if not rows:
        return "<p>Not measured.</p>"
    names = names or list(rows[0])
    return table(names, [[escape(_short(row.get(name, ""))) for name in names] for row in rows])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
