"""The source of docs/http.md: run `python -m support.differences > ../docs/http.md` in tests/."""

from collections.abc import Iterator

from support.corpus import Entry, entries, names

TOP = """# HTTP: what is refused, and where uvicorn answers otherwise

The server's HTTP/1.1 is its own, on llhttp's parser (httptools). The requests below are some of
`tests/hostile/http/*.toml`, which has each byte of them; `make test-hostile` sends all of them to
this server and to plain uvicorn with either of its parsers. Listed is where uvicorn's answers
(0.54, httptools 0.9, h11 0.16) are not those that are right. "None" means no answer within 1.5
seconds: uvicorn has no deadlines for heads and bodies, and no limits on bodies.

This page is made from those files (`tests/support/differences.py`).
"""


def page() -> str:
    return "\n".join([TOP, *(line for name in names() for line in _table(name))]) + "\n"


def _table(name: str) -> Iterator[str]:
    rows = [entry for entry in entries(name) if entry.theirs]
    if not rows:
        return
    yield f"## {name.capitalize()}\n"
    yield "| request | right | httptools | h11 | why | |\n| --- | --- | --- | --- | --- | --- |"
    yield from (_row(entry) for entry in rows)
    yield ""


def _row(entry: Entry) -> str:
    cells = (
        entry.name,
        _right(entry),
        entry.theirs.get("httptools", "as right"),
        entry.theirs.get("h11", "as right"),
        entry.why,
        entry.rfc,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _right(entry: Entry) -> str:
    """Return the right answers as text, such as "100 x 404, 400 or 413"."""
    texts = [" or ".join(map(str, sorted(allowed))) for allowed in entry.answers]
    runs: list[tuple[str, int]] = []
    for text in texts:
        times = runs.pop()[1] + 1 if runs and runs[-1][0] == text else 1
        runs.append((text, times))
    return ", ".join(text if times == 1 else f"{times} x {text}" for text, times in runs)


if __name__ == "__main__":
    print(page(), end="")
