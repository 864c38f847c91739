"""Tables as text and as HTML, and pages of tables, for the reports of several commands."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from gpuscore.errors import ConfigError

# A wide table scrolls by itself, so that the page fits a phone.
_STYLE = """body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }
.wide { overflow-x: auto; margin: 1em 0 2em } table { border-collapse: collapse }
td, th { padding: 3px 10px; text-align: right; vertical-align: top; white-space: nowrap }
.words td, .words th { text-align: left } .words td:nth-child(n+2) { white-space: normal }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto }
.failed { color: #b00020; font-weight: bold } td.text { text-align: left }"""


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table with aligned columns, the first one to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        first, *rest = zip(line, widths, strict=True)
        cells = [f"{first[0]:<{first[1]}}", *(f"{text:>{width}}" for text, width in rest)]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def write_html(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write a page of `parts`, which are HTML; raise ConfigError as `write`, with --report."""
    write(path, page(title, parts), "--report")


def page(title: str, parts: Sequence[str]) -> str:
    """Return a self-contained page of `parts`, which are HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</html>\n"
    )


def write(path: Path, text: str, flag: str) -> None:
    """Write a file; raise ConfigError, with the flag that names it, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error}") from error


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Return an HTML table of cells that are HTML; its kind is "numbers" or "words"."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td>{cell}</td>" for cell in cells) for cells in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table class="{kind}">{body}</table></div>'


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """Return an HTML table of cells that are text, as `table` does of HTML."""
    return table([*map(escape, head)], [[*map(escape, row)] for row in rows], kind)
