"""Ray Serve: `serve run gpuscore.ray:app model=MODEL`. Needs gpuscore[ray]."""

from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Import the application when it is asked for: the engines of bulk jobs need no Ray Serve."""
    if name != "app":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        import ray.serve  # noqa: F401  (Ray without its extra `serve` does not do)
    except ImportError as error:
        wanted = "gpuscore.ray needs Ray: pip install 'gpuscore[ray]'"
        raise ImportError(f"{wanted} ({error})") from error
    from gpuscore.ray.application import app

    return app
