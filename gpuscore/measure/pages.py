"""Tables and verdicts as text of at most 120 columns, and as a self-contained HTML page."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gpuscore.errors import ConfigError

WIDTH = 120
NAME = 36  # columns of a name, which is cut in its middle
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
        title: above it.
        head, rows: of cells that are text.
        notes: below it.
        names: number of first columns, which say what a row is.
        words: cells are sentences, which a page aligns to the left.
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
        """Yield the table; columns beyond the width follow below, after the names again."""
        columns = [[*map(_cut, column)] for column in zip(self.head, *self.rows, strict=True)]
        names, rest = columns[: self.names], columns[self.names :]
        while rest:
            shown = [*names, rest.pop(0)]
            while rest and _width([*shown, rest[0]]) <= WIDTH:
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


def _cut(text: str) -> str:
    return text if len(text) <= NAME else f"{text[:12]}…{text[-(NAME - 13) :]}"


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + 2 * (len(columns) - 1)


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
