"""Queries with items as JSON lines, and the file of real sentences that is shipped."""

from pathlib import Path

import msgspec

from gpuscore.errors import UsageError

# Questions, each with sentences of this project's documentation; some sentences answer it.
SENTENCES = Path(__file__).with_name("sentences.jsonl")


class QueryTexts(msgspec.Struct, frozen=True):
    """A query and the items to be scored after it."""

    query: str
    items: list[str]


def read_texts(path: Path, name: str) -> list[QueryTexts]:
    """Read a file of JSON lines with `query` and `items`; lines without items are left out.

    Raises:
        UsageError: it cannot be read; `name` and the line's number are part of the message.
    """
    decode, texts = msgspec.json.Decoder(QueryTexts).decode, []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{name} {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            entry = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{name} {path}, line {number}: {error}") from error
        if entry.items:
            texts.append(entry)
    if not texts:
        raise UsageError(f"{name} {path}: no line has items")
    return texts
