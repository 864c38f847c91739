"""The page of bench/gpu_day.py: stages, and tables of findings."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpuscore.measure.reports import table, write_html

Found = Mapping[str, Any]
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
