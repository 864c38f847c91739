"""Ray Serve: `serve run gpuscore.ray:app model=MODEL`. Needs gpuscore[ray]."""

try:
    import ray.serve  # noqa: F401  (Ray without its extra `serve` does not do)
except ImportError as error:
    raise ImportError(f"gpuscore.ray needs Ray: pip install 'gpuscore[ray]' ({error})") from error

from gpuscore.ray.application import app

__all__ = ["app"]
