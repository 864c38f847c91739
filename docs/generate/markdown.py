"""Parts of Markdown pages."""

from collections.abc import Iterable, Sequence

NOTE = "<!-- Made by docs/generate from the code; changes here are lost. -->"


def page(title: str, *blocks: str) -> str:
    """Return a page of blocks, each a paragraph, a table or a list."""
    return "\n\n".join([f"# {title}", NOTE, *(block for block in blocks if block)]) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


def block(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
