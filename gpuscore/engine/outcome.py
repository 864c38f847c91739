"""Resolving a request's future with its result or its error."""

from concurrent.futures import Future, InvalidStateError

from gpuscore.errors import GpuscoreError
from gpuscore.types.request import ScoreResult


def resolve(future: "Future[ScoreResult]", outcome: ScoreResult | GpuscoreError) -> None:
    """Set a request's result or error, unless its future was cancelled meanwhile."""
    try:
        if isinstance(outcome, GpuscoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass
