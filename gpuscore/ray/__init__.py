"""Ray: an application of Ray Serve, `serve run gpuscore.ray:app model=MODEL`, and a step for
pipelines of Ray Data, `ScoreBatches`. Needs gpuscore[ray]."""

from typing import Any

from gpuscore.system.extras import install

__all__ = ["ScoreBatches", "app"]


def __getattr__(name: str) -> Any:
    """Import a name on first use: a step of Ray Data does not need Ray Serve."""
    if name == "ScoreBatches":
        from gpuscore.ray.columns import ScoreBatches

        return ScoreBatches
    if name != "app":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        from gpuscore.ray.application import app
    except ImportError as error:  # Ray without its extra `serve` does not do
        raise ImportError(f"gpuscore.ray needs Ray: {install('ray')} ({error})") from error
    return app
