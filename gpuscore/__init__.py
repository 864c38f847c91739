"""gpuscore: label probabilities for many items from one decoder-only model, without decoding.

`Scorer` is imported on first use, so that `import gpuscore` does not pull in torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuscore.scorer import Scorer

__version__ = "0.1.0"
__all__ = ["Scorer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Scorer":
        from gpuscore.scorer import Scorer

        return Scorer
    raise AttributeError(f"module 'gpuscore' has no attribute {name!r}")
