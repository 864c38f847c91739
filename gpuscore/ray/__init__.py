"""Ray: an application of Ray Serve, `serve run gpuscore.ray:app model=MODEL`, and a step for
pipelines of Ray Data, `ScoreBatches`. Needs gpuscore[ray]."""

from importlib import import_module
from typing import Any

__all__ = ["ScoreBatches", "app"]
_MODULES = {"ScoreBatches": "columns", "app": "application"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a step of Ray Data does not need Ray Serve."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
