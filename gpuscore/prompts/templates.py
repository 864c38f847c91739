"""The parts of a family's prompt around a document, and prompts of documents by query."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from gpuscore.prompts.family import DOCUMENT, fields_of
from gpuscore.text.checks import PromptsFrom
from gpuscore.types.arrays import NO_TOKENS, Int32Array


class DocumentTemplate:
    """The parts of a family's prompt, split at the part with the document."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        place = next(i for i, part in enumerate(parts) if DOCUMENT in fields_of(part))
        self.before, self.last, self.after = parts[:place], parts[place], parts[place + 1 :]
        # The parts before the first caller's text.
        fixed = next(i for i, part in enumerate(parts) if fields_of(part))
        self.fixed = parts[:fixed]


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """The prompts of neighbouring documents that have the same query.

    Args:
        prompts: the ids of their prompts.
        count: number of documents.
        num_shared: number of first tokens that all prompts share, known from the query alone.
        truncated: indices of the documents that were cut.
    """

    prompts: PromptsFrom
    count: int
    num_shared: int
    truncated: list[int]


def prompts_of(groups: Sequence[QueryGroup], start: int) -> Iterator[Int32Array]:
    """Yield the prompts of all groups, one after the other, from a number on."""
    for group in groups:
        if start < group.count:
            yield from group.prompts(start)
        start = max(0, start - group.count)


def refused_group(count: int) -> QueryGroup:
    """Return a group with empty prompts in the place of those that cannot be made."""
    return QueryGroup(lambda start: repeat(NO_TOKENS, count - start), count, 0, [])
