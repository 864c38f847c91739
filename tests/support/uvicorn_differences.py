"""The source of docs/http.md.

Run `python -m support.uvicorn_differences > ../docs/http.md` in tests.
"""

from collections.abc import Iterator

from support.hostile_requests import Entry, entries, names

TOP = """# HTTP beside uvicorn

The server has its own HTTP/1.1, on llhttp's parser (httptools). `make test-hostile` sends every
request of `tests/hostile/http/*.toml`, which has all of their bytes, to this server and to plain
uvicorn with either of its parsers. This page lists the requests that uvicorn (0.54, httptools 0.9,
h11 0.16) answers wrongly, with the right status, which is this server's, and uvicorn's with each
parser. "None" means no answer within 1.5 seconds: uvicorn has no deadlines for heads and bodies,
and no limits on bodies.

`tests/support/uvicorn_differences.py` generates this page from those files.
"""


def page() -> str:
    return "\n".join([TOP, *(line for name in names() for line in _table(name))]) + "\n"


def _table(name: str) -> Iterator[str]:
    rows = [entry for entry in entries(name) if entry.theirs]
    if not rows:
        return
    yield f"## {name.capitalize()}\n"
    yield "| request | right | httptools | h11 | reason | source |"
    yield "| --- | --- | --- | --- | --- | --- |"
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
