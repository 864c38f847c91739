"""The HTML report: the tables of standard output, with plots."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from gpuscore.arrays import Float64Array
from gpuscore.errors import ConfigError
from gpuscore.parity.gates import Comparison, Verdict
from gpuscore.parity.measures import by_length
from gpuscore.parity.metrics import errors
from gpuscore.parity.runs import Run
from gpuscore.parity.svg import histogram, scatter
from gpuscore.parity.table import ABOUT_RANKS, HEAD, measured, row
from gpuscore.parity.workload import Workload

# A wide table scrolls by itself, so that the page fits a phone.
_STYLE = """body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
.wide { overflow-x: auto; margin: 1em 0 2em } table { border-collapse: collapse }
td, th { padding: 3px 10px; text-align: right; vertical-align: top; white-space: nowrap }
.words td, .words th { text-align: left } .words td:last-child { white-space: normal }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto }
.failed { color: #b00020; font-weight: bold } td.text { text-align: left }"""

STATES = {True: "passed", False: '<span class="failed">failed</span>', None: "skipped"}


def write_report(
    path: Path,
    title: str,
    facts: Mapping[str, str],
    workload: Workload,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
    reference: str,
) -> None:
    """Write a self-contained HTML file; raise ConfigError if it cannot be written."""
    plots = [_plots(workload, found) for found in comparisons]
    write_html(
        path,
        title,
        [
            table((), [(escape(name), escape(value)) for name, value in facts.items()], "words"),
            "<h2>Differences</h2>",
            table(HEAD, [tuple(map(escape, row(found))) for found in comparisons]),
            f"<p>{escape(ABOUT_RANKS)}</p>",
            _measured(workload, comparisons),
            f"<h2>Gates</h2><p>{escape(reference)}</p>",
            table(("gate", "of", "verdict", "found"), list(map(_verdict, verdicts)), "words"),
            *plots,
        ],
    )


def write_html(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write a page of `parts`, which are HTML; raise ConfigError if it cannot be written."""
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path}: {error}") from error


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Return an HTML table of cells that are HTML; its kind is "numbers" or "words"."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td>{cell}</td>" for cell in cells) for cells in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def _plots(workload: Workload, found: Comparison) -> str:
    lengths = by_length(workload, found.want, found.got)
    return (
        f"<h2>{escape(found.got.name)} against {escape(found.want.name)}</h2>"
        + histogram(lengths.log_p, "Errors")
        + scatter(_values(workload, found.want), _values(workload, found.got), "Score by score")
        + _by_tokens("tokens of the prompt", lengths.prompt, lengths.log_p)
        + _by_tokens("tokens of the item", lengths.item, lengths.log_p)
    )


def _by_tokens(what: str, tokens: Float64Array, differences: Float64Array) -> str:
    """Return a table of differences by the number of tokens, in powers of two."""
    rows = []
    known = ~np.isnan(tokens)
    upper = np.ceil(np.log2(np.maximum(1, tokens[known]))).astype(int)
    for power in np.unique(upper).tolist():
        part = differences[known][upper == power]
        found = errors(part)
        numbers = (part.mean(), found.median, found.p99, found.maximum)
        rows.append((f"up to {2**power}", str(len(part)), *(f"{one:.1e}" for one in numbers)))
    return table((what, "scores", "bias", "median |d log p|", "p99", "max"), rows)


def _measured(workload: Workload, comparisons: Sequence[Comparison]) -> str:
    head, rows, note = measured(workload, comparisons)
    return (
        table(tuple(map(escape, head)), [tuple(map(escape, cells)) for cells in rows])
        + f"<p>{escape(note)}</p>"
    )


def _verdict(verdict: Verdict) -> tuple[str, ...]:
    return verdict.gate, escape(verdict.subject), STATES[verdict.passed], escape(verdict.detail)


def _values(workload: Workload, run: Run) -> Float64Array:
    return np.concatenate([run.results[case.name].values.ravel() for case in workload.cases])
