"""A caller's query and documents, for the prompts of a family."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuscore.errors import InvalidRequest
from gpuscore.types.item_errors import ItemErrors, check_text, checked_texts
from gpuscore.types.request import ScoreRequest


@dataclass(frozen=True, slots=True)
class RerankInput:
    """A caller's query and documents.

    Args:
        query: one query for all documents, one for each, or None for guards.
        documents: at least one.
        instruction: replaces the family's own.
        most_tokens: number of tokens after which a document is cut; None: not cut.
        fit: cut documents so that their prompts fit the model's context.
        priority: of the request; a lower value runs first.
        need_lse: ask for the log-sum-exp over the vocabulary.
        name: the caller's name for the documents, for errors.
        query_name: the caller's name for the query, for errors.
    """

    query: str | Sequence[str] | None
    documents: Sequence[str]
    instruction: str | None = None
    most_tokens: int | None = None
    fit: bool = False
    priority: int = 0
    need_lse: bool = False
    name: str = "documents"
    query_name: str = "query"

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

    def check_queries(self) -> None:
        """Raise InvalidRequest unless there is one query, or one for each document."""
        queries, documents = len(self.queries), len(self.documents)
        if queries != documents:
            raise InvalidRequest(
                f"{self.query_name} has {queries} texts and {self.name} has {documents}; send one "
                "query, or one for each document",
                param=self.query_name,
            )

    def checked(self, errors: ItemErrors) -> "RerankInput":
        """Return the input with empty texts for those that cannot be read, which get errors.

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
    """A request to the engine, with the indices of the documents that were cut."""

    request: ScoreRequest
    truncated: tuple[int, ...]
