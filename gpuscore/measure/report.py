"""The report of all commands that measure or compare: tables, verdicts and machines, as text of at
most 120 columns and as a self-contained HTML page."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.exits import EXIT_FAILED, EXIT_OK
from gpuscore.measure.agreement import Agreement
from gpuscore.measure.gates import Verdict
from gpuscore.measure.results import Measured

HEAD = ("scores", "against", "max |d log p|", "p99", "mean", "max |d p|", "tau-b", "inversions")
ABOUT = (
    "(in brackets the 95 % interval by bootstrap over queries; tau-b is the smallest of all "
    "rankings; mass is the largest distance from the labels' sum)"
)
WORDS = {True: "ok", False: "FAIL", None: "skip"}
WIDTH = 120
NAME = 36  # longest name; the middle of a longer one is left out
# A wide table scrolls by itself, so that the page fits a phone.
_STYLE = """body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em }
.wide { overflow-x: auto; margin: 1em 0 2em } table { border-collapse: collapse }
td, th { padding: 3px 10px; text-align: right; vertical-align: top; white-space: nowrap }
.words td, .words th { text-align: left } .words td:nth-child(n+2) { white-space: normal }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
.failed { color: #b00020; font-weight: bold }"""


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table with a title and notes.

    Attributes:
        names: number of leading columns that name what a row is about.
        words: true if cells are sentences; a page aligns them to the left.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    names: int = 1
    words: bool = False

    def as_text(self) -> str:
        notes = [line for note in self.notes for line in textwrap.wrap(note, WIDTH)]
        return "\n".join([*textwrap.wrap(self.title, WIDTH), *self._blocks(), *notes])

    def _blocks(self) -> Iterable[str]:
        """Yield the lines. Columns that do not fit follow below, with the names repeated."""
        columns = [[*map(_shorten, column)] for column in zip(self.head, *self.rows, strict=True)]
        rest = columns[self.names :]
        while rest:
            shown = [*columns[: self.names], rest.pop(0)]
            while rest and sum(2 + max(map(len, each)) for each in (*shown, rest[0])) <= WIDTH + 2:
                shown.append(rest.pop(0))
            widths = [max(map(len, column)) for column in shown]
            for first, *cells in zip(*shown, strict=True):
                aligned = [
                    f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)
                ]
                yield "  ".join([f"{first:<{widths[0]}}", *aligned])

    def as_html(self) -> str:
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in self.head)] if self.head else []
        for cells in self.rows:
            styled = ((" class=failed" if cell == "FAIL" else "", escape(cell)) for cell in cells)
            lines.append("".join(f"<td{style}>{cell}</td>" for style, cell in styled))
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        kind = "words" if self.words else "numbers"
        title = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f'{title}<div class="wide"><table class="{kind}">{body}</table></div>{notes}'


def filled(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> ResultTable:
    """Return a table with two columns of names, without the columns that are empty in all rows."""
    columns = list(zip(head, *rows, strict=True))
    shown = [*columns[:2], *(column for column in columns[2:] if set(column[1:]) != {"-"})]
    head, *lines = zip(*shown, strict=True)
    return ResultTable(title, head, lines, notes, names=2)


def _shorten(text: str) -> str:
    return text if len(text) <= NAME else f"{text[:12]}…{text[-(NAME - 13) :]}"


def conclude(
    path: str | None,
    title: str,
    times: Sequence[ResultTable],
    judged: tuple[Sequence[Agreement], Sequence[Verdict]],
    facts: Mapping[str, Mapping[str, object]],
) -> int:
    """Print tables and verdicts, and write the page if `path` names one; return the exit code.

    Args:
        judged: agreement of scores, one row each, and the verdicts on them.
        facts: what the page says about each subject.

    Raises:
        ConfigError: the page cannot be written.
    """
    found, verdicts = judged
    tables = [*times, *([_agreement(found)] if found else [])]
    parts = [table.as_text() for table in tables]
    lines = (f"{WORDS[v.passed]:<4}  {v.subject}, {v.gate}: {v.detail}" for v in verdicts)
    parts += ["\n".join(lines)] if verdicts else []
    print("\n\n".join(parts))
    if path is not None:
        cells = [(WORDS[v.passed], v.gate, v.subject, v.detail) for v in verdicts]
        gates = [ResultTable("Gates", ("verdict", "gate", "of", "found"), cells, words=True)]
        about = [
            ResultTable(name, (), [(k, _said(value)) for k, value in some.items()], words=True)
            for name, some in facts.items()
        ]
        write_page(Path(path), title, [*tables, *(gates if cells else []), *about])
        print(f"wrote {path}")
    return EXIT_FAILED if any(verdict.failed for verdict in verdicts) else EXIT_OK


def _agreement(found: Sequence[Agreement]) -> ResultTable:
    rows = [
        (
            *(one.got.name, one.reference.name),
            *(f"{one.log_p.maximum:.1e}", f"{one.log_p.p99:.1e}", f"{one.mean:.1e}"),
            *(f"{one.p:.1e}", "-" if one.tau is None else f"{one.tau:.4f}"),
            f"{one.inversions} of {one.clear_pairs}",
            "-" if one.mass is None else f"{one.mass:.1e}",
            "-" if one.got.alone is None else f"{one.got.alone:.1e}",
        )
        for one in found
    ]
    return filled("Scores", (*HEAD, "mass", "alone"), rows, [ABOUT])


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(item)}" for name, item in value.items()) or "defaults"
    return str(value)


def facts_of(server: Measured) -> dict[str, object]:
    """Return what is known of a server, for people."""
    return {**server.facts, "model": server.model, "dtype": server.dtype}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_page(path: Path, title: str, tables: Iterable[ResultTable]) -> None:
    """Write a page of tables; raise ConfigError if it cannot be written."""
    inner = "\n".join(table.as_html() for table in tables)
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>\n"
        f"{inner}\n</html>\n"
    )
    write(path, page, "--report")


def write(path: Path, text: str, flag: str) -> None:
    """Write a file; raise ConfigError, with the flag that names it, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
