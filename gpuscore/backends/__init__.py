"""Devices behind one interface (`base.Backend`); each is imported only when it is used."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuscore.backends.base import Backend, Prepared
from gpuscore.config import ModelConfig

if TYPE_CHECKING:
    from gpuscore.backends.torch.plan import BackendPlan


def plan_backend(directory: Path, config: ModelConfig) -> "BackendPlan":
    """What would be loaded; raises ConfigError, in one sentence, for what cannot be served."""
    from gpuscore.backends.torch.plan import plan_backend

    return plan_backend(directory, config)


def create_backend(plan: "BackendPlan") -> Backend:
    """Load the weights; raises ConfigError for a damaged checkpoint."""
    from gpuscore.backends.torch.backend import TorchBackend

    return TorchBackend(plan)


def prepare(directory: Path, config: ModelConfig) -> Prepared:
    """Both in two steps, for the engine's own process; raises ConfigError."""
    plan = plan_backend(directory, config)
    return Prepared(f"{plan.dtype} on {plan.device}", partial(create_backend, plan))
