"""The outcome of one check."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["OK", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Args:
        name: of the check.
        level: a problem keeps a server from starting; a warning makes it slower or limits it.
        found: what is there.
        remedy: what to do; empty if nothing is needed.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""
