"""System One's questions as prompts: `noul`, `choice` and `score`, with instructions and criteria.

Contents are text, or objects and arrays, which the model reads as JSON.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gpuscore.config import RequestLimits
from gpuscore.errors import InvalidRequest
from gpuscore.prompts.decision_texts import (
    PAIRS,
    DecisionQuestion,
    check_count,
    choice,
    json_text,
    level,
    yes_or_no,
)

Content: TypeAlias = str | dict[str, Any] | list[Any]


def content_text(value: Content | None) -> str | None:
    return value if value is None or isinstance(value, str) else json_text(value)


def noul_question(
    instructions: Content | None, true: Content | None, false: Content | None, param: str
) -> DecisionQuestion:
    """Return a question with the answers yes and no; `param` names it in errors."""
    if instructions is None and true is None and false is None:
        raise InvalidRequest(f"{param} has neither instructions nor criteria", param=param)
    return yes_or_no(*map(content_text, (instructions, true, false)))


def choice_question(
    instructions: Content | None,
    criteria: Mapping[str, Content | None],
    limits: RequestLimits,
    param: str,
) -> DecisionQuestion:
    """Return a question with one answer per name of the criteria."""
    check_count(len(criteria), 1, most_options(limits.max_options), "criteria", param)
    options = [(name, content_text(told) or "") for name, told in criteria.items()]
    return choice(content_text(instructions), options)


def score_question(
    instructions: Content | None, criteria: Sequence[Content], limits: RequestLimits, param: str
) -> DecisionQuestion:
    """Return a question with one answer per level, lowest first."""
    check_count(len(criteria), 1, most_options(limits.max_levels), "criteria", param)
    levels = [(content_text(one) or "", "") for one in criteria]
    return level(content_text(instructions), levels)


def most_options(limit: int) -> int:
    """Return a limit on options; there are no more than there are labels."""
    return min(limit, len(PAIRS))


def check_questions(count: int, most: int) -> None:
    """Raise InvalidRequest unless there is a question, and no more than `most`."""
    if not 1 <= count <= most:
        raise InvalidRequest(
            f"there are {count} questions; supported: 1 to {most}", param="questions"
        )
