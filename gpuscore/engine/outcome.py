"""Handing an outcome to whoever waits for it."""

from concurrent.futures import Future, InvalidStateError

from gpuscore.errors import GpuscoreError
from gpuscore.request import ScoreResult


def resolve(future: "Future[ScoreResult]", outcome: ScoreResult | GpuscoreError) -> None:
    """Answer a request, unless it was cancelled meanwhile: then nobody is waiting."""
    try:
        if isinstance(outcome, GpuscoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass
