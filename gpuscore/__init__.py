"""gpuscore: label probabilities for many items from one decoder-only model, without decoding.

`Scorer` is imported on first use, so that `import gpuscore` does not pull in torch. All errors that
callers can get are in `gpuscore.errors`.
"""

from typing import TYPE_CHECKING, Any

from gpuscore.errors import ConfigError, GpuscoreError

if TYPE_CHECKING:
    from gpuscore.offline.scorer import Scorer

__version__ = "0.1.0"
__all__ = ["ConfigError", "GpuscoreError", "Scorer", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "Scorer":
        raise AttributeError(f"module 'gpuscore' has no attribute {name!r}")
    try:
        from gpuscore.offline.scorer import Scorer
    except ModuleNotFoundError as error:
        from gpuscore.system.extras import remedy

        if (needed := remedy(error)) is None:
            raise
        raise ImportError(f"gpuscore.Scorer needs {needed}") from error
    return Scorer
