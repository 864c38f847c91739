"""A caller's query and documents, and truncation of documents that are too long."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpuscore.text.boundaries import OverLimit
from gpuscore.text.controls import ControlToken
from gpuscore.text.joining import Prompts
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import Int32Array
from gpuscore.types.item_errors import ItemErrors, check_text, checked_texts
from gpuscore.types.request import ScoreRequest, Terms


@dataclass(frozen=True, slots=True)
class RerankInput:
    """A caller's query and documents.

    Args:
        query: one query for all documents, one for each, or None for guards.
        documents: the texts to score, at least one.
        instruction: replaces the family's own.
        most_tokens: number of tokens after which a document is cut; None: not cut.
        fit: cut documents so that their prompts fit the model's context.
        terms: the request's terms.
        need_lse: ask for the log-sum-exp over the vocabulary.
        name: the caller's name for the documents, for errors.
        query_name, instruction_name: the caller's names for the query and the instruction.
    """

    query: str | Sequence[str] | None
    documents: Sequence[str]
    instruction: str | None = None
    most_tokens: int | None = None
    fit: bool = False
    terms: Terms = Terms()
    need_lse: bool = False
    name: str = "documents"
    query_name: str = "query"
    instruction_name: str = "instruction"

    @property
    def queries(self) -> list[str]:
        """The query of each document; empty texts if there is none."""
        if isinstance(self.query, str) or self.query is None:
            return [self.query or ""] * len(self.documents)
        return list(self.query)

    def without(self, errors: ItemErrors) -> "RerankInput":
        """Return the input without the documents that have errors, and without their queries."""
        query = self.query
        if query is not None and not isinstance(query, str):
            query = errors.rest(query)
        return replace(self, query=query, documents=errors.rest(self.documents))

    def checked(self, errors: ItemErrors) -> "RerankInput":
        """Return the input; texts that cannot be read become empty and get errors.

        Raises:
            InvalidRequest: the query of all documents cannot be read.
        """
        query = self.query
        if isinstance(query, str):
            check_text(query, self.query_name)
        elif query is not None:
            query = checked_texts(query, self.query_name, errors)
        return replace(
            self, query=query, documents=checked_texts(self.documents, self.name, errors)
        )


@dataclass(frozen=True, slots=True)
class Rerank:
    """A request to the engine, with the indices of the documents that were cut.

    The request is None if every document has an error.
    """

    request: ScoreRequest | None
    truncated: tuple[int, ...]


def prompts_of(groups: Sequence[Prompts], start: int) -> Iterator[Int32Array]:
    """Yield the prompts of all groups, one after the other, from prompt number `start` on."""
    for group in groups:
        if start < group.count:
            yield from group.ids(start)
        start = max(0, start - group.count)


SURE = 8  # a document that leaves so many tokens free fits, however it merges with other text


class DocumentTruncator:
    """Truncates documents so that their prompts fit the model's context; serves one query.

    Args:
        encoder: encodes the part of the prompt with the document.
        head, tail: the text before and after the document in that part.
        limit: tokens of that part.

    Raises:
        OverLimit: the prompt is too long even without a document.
    """

    def __init__(self, encoder: TextEncoder, head: str, tail: str, limit: int) -> None:
        self._encoder = encoder
        self._tail = tail
        self._limit = limit
        self._free = limit - len(encoder.plain_ids(head + tail, limit))
        self._text = tail
        self._joined = encoder.joined(head, lambda _: [self._text], False, limit)

    def truncate(self, document: str) -> str | None:
        """Return the document if it fits, else its longest beginning of whole tokens that does.

        Return None if not even one token fits.
        """
        if self._free > SURE and self._first(document, self._free - SURE) == document:
            return document
        fits = 0
        over = len(document) + 1
        count = max(1, self._free)  # in tokens
        while over - fits > 1:
            short = self._first(document, count)
            try:
                excess = self._excess(short)
            except ControlToken:
                return document  # refused with its place when its prompt is made
            if excess <= 0 and short == document:
                return document
            fits, over = (count, over) if excess <= 0 else (fits, count)
            count = min(max(fits + 1, count - (excess or -1)), over - 1)
        return self._first(document, fits) if fits else None

    def _first(self, document: str, count: int) -> str:
        return self._encoder.first_tokens(document, count)

    def _excess(self, document: str) -> int:
        """Return the number of tokens by which the part with this document is too long."""
        self._text = f"{document}{self._tail}"
        try:
            return len(next(self._joined(0))) - self._limit
        except OverLimit as over:
            return over.least - self._limit
