"""SVG plots of bench/serve.py's rows, written beside its JSON lines.

python bench/plots.py bench/results/serve.jsonl      # redraws the last run of each backend
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from traffic import QUANTILES

Rows = Sequence[dict[str, Any]]
STYLE = {
    "svg.fonttype": "none",  # text stays text: small files
    "svg.hashsalt": "gpuscore",  # the same rows give the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.titlesize": 10,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}
COLORS = ["#1f5a91", "#7aa6c9", "#c47a2c", "#8a1c1c"]


def draw(backend: str, rows: Rows, folder: Path) -> None:
    """Write serve-<backend>-ladder.svg and serve-<backend>-poisson.svg, if there are rows."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        ladder = [row for row in rows if row["stage"] == "ladder"]
        if len(ladder) > 1:
            _save(_ladder(pyplot, backend, ladder), folder / f"serve-{backend}-ladder.svg")
        loads = [row for row in rows if row["stage"] == "poisson"]
        if loads:
            _save(_poisson(pyplot, backend, loads), folder / f"serve-{backend}-poisson.svg")


def _ladder(pyplot: Any, backend: str, rows: Rows) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for color, cache in zip(COLORS[::2], ("cold", "warm"), strict=False):
        some = [row for row in rows if row["cache"] == cache]
        clients = [row["clients"] for row in some]
        left.plot(clients, [row["req/s"] for row in some], "o-", color=color, label=cache)
    cold = [row for row in rows if row["cache"] == "cold"]
    for color, name in zip(COLORS, ("p50 ms", "p90 ms", "p99 ms"), strict=False):
        clients, values = [row["clients"] for row in cold], [row[name] for row in cold]
        right.plot(clients, values, "o-", color=color, label=name.removesuffix(" ms"))
    left.set(title=f"{backend}: requests/s, {rows[0]['shape']} tokens", ylim=(0, None))
    right.set(title="latency in ms, cache cold", yscale="log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["clients"] for row in cold])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("requests in flight")
        axes.legend(frameon=False)
    return figure


def _poisson(pyplot: Any, backend: str, rows: Rows) -> Any:
    figure, axes = pyplot.subplots(figsize=(5.5, 3.4), layout="constrained")
    for color, row in zip(COLORS, rows, strict=False):
        if row["latencies ms"][0] is not None:
            label = f"{row['load']}: {row['offered']:.0f}/s"
            axes.plot(row["latencies ms"], QUANTILES, color=color, label=label)
    axes.set(
        title=f"{backend}: latency from the scheduled arrival, {rows[0]['shape']} tokens",
        xscale="log",
        xlabel="ms",
        ylabel="share of requests answered with scores",
        ylim=(0, 1),
    )
    axes.legend(frameon=False)
    return figure


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(path)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    runs = {run["backend"]: run["rows"] for run in map(json.loads, source.open())}
    for name, found in runs.items():
        draw(name, found, source.parent)
