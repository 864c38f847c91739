"""Ray: an application of Ray Serve, `serve run gpuscore.ray:app model=MODEL`, and a step for
pipelines of Ray Data, `ScoreBatches`. Needs gpuscore[ray]."""

from typing import Any

from gpuscore.system.extras import install

__all__ = ["ScoreBatches", "app"]


def __getattr__(name: str) -> Any:
    """Import a name on first use: a step of Ray Data does not need Ray Serve."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    if name == "ScoreBatches":
        from gpuscore.ray.columns import ScoreBatches

        return ScoreBatches
    try:
        import ray.serve  # noqa: F401  (Ray without its extra `serve` does not do)
    except ImportError as error:
        wanted = f"gpuscore.ray needs Ray: {install('ray')}"
        raise ImportError(f"{wanted} ({error})") from error
    from gpuscore.ray.application import app

    return app
