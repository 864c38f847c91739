"""The plain types that go from one step of a batch job to the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpuscore.types.batch import Float64Array


class TextRow(NamedTuple):
    """A row's texts in UTF-8. Rows sort by them, so rows that begin alike become neighbours."""

    first: bytes  # rows with the same first text become one request
    rest: bytes
    number: int  # of the row in the whole input, from 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a row cannot be scored, for its line in OUTPUT.bad.jsonl."""

    reason: str


@dataclass(frozen=True, slots=True)
class RowScoring:
    numbers: Sequence[int]
    scores: Float64Array  # [rows, labels]


@dataclass(frozen=True, slots=True)
class BadTextRow:
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class AnswerLine:
    """The answer to a line of a file of requests."""

    number: int
    line: bytes  # JSON, without a line end
    failed: bool


Settled = RowScoring | BadTextRow | AnswerLine


class Block(Protocol):
    """Consecutive rows of one input file."""

    @property
    def count(self) -> int:
        """Number of rows, bad ones included."""

    def texts(self, columns: Sequence[str]) -> list[tuple[str, ...] | Problem]:
        """Return the texts of these columns for every row."""

    def lines(self, keep: Sequence[int], scores: Float64Array, name: str) -> list[bytes]:
        """Return rows as JSON, each with its scores added.

        Args:
            keep: numbers of the rows in this block.
            scores: [rows kept, labels].
            name: of the field with the scores.
        """

    def table(self, keep: Sequence[int], schema: Any) -> Any:
        """Return rows as an Arrow table of this schema."""

    def about(self, index: int) -> dict[str, Any]:
        """Return the place and the content of a row, for its line in OUTPUT.bad.jsonl."""
