"""The backends, behind one interface (`base.Backend`); each is imported only when it is used."""

import logging
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gpuscore.backends.base import Backend, Prepared
from gpuscore.backends.common.quantization import described
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

if TYPE_CHECKING:
    from gpuscore.backends.jax.plan import JaxPlan
    from gpuscore.backends.torch.plan import TorchPlan

logger = logging.getLogger(__name__)

Plan: TypeAlias = "TorchPlan | JaxPlan"

# Settings of torch's allocator for CUDA, which torch reads from the environment. Batches have all
# sizes. Blocks at fixed addresses would soon leave gaps that are too small for the largest batch.
# Segments that grow leave none.
ALLOCATOR = "expandable_segments:True"
# torch's name, and its older one.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def plan_backend(directory: Path, config: ModelConfig) -> Plan:
    """Decide what to load, without reading weights; raises ConfigError if it is not supported."""
    if config.backend == "jax":
        if find_spec("jax") is None:
            raise ConfigError(f"--backend jax: JAX is not installed here; {install('jax')}")
        from gpuscore.backends.jax import plan as of_jax

        return of_jax.plan_backend(directory, config)
    set_allocator()
    from gpuscore.backends.torch import plan as of_torch

    return of_torch.plan_backend(directory, config)


def create_backend(plan: Plan, lost: Callable[[str], None] = lambda line: None) -> Backend:
    """Load the weights; raises ConfigError for a damaged checkpoint.

    Args:
        plan: what to load.
        lost: called with one line for people when another rank has ended.
    """
    if plan.framework == "torch" and plan.shard.ranks > 1:
        from gpuscore.backends.torch.ranks.backend import ParallelBackend

        return ParallelBackend(plan, lost)
    if plan.architecture.storage is not None:
        from gpuscore.backends.torch.scales import check_scales

        check_scales(Path(plan.directory), plan.architecture, plan.settings.allow_degenerate)
    if plan.framework == "jax":
        from gpuscore.backends.jax.backend import JaxBackend

        return JaxBackend(plan)
    from gpuscore.backends.torch.backend import TorchBackend

    return TorchBackend(plan)


def prepare(directory: Path, config: ModelConfig) -> Prepared:
    """Plan now and return a function that loads, for the engine's process; raises ConfigError."""
    plan = plan_backend(directory, config)
    about = f"{plan.dtype_name} on {plan.device_name}"
    if config.tensor_parallel > 1:
        about += f", in {config.tensor_parallel} ranks"
    if plan.precision != "full":
        about += f", linear layers {described(plan.precision, plan.architecture.storage)}"
    return Prepared(about, partial(create_backend, plan, lost=_end_process))


def _end_process(line: str) -> None:
    """Log why this engine's process cannot go on, and end it; its supervisor starts another."""
    logger.critical(line)
    logging.shutdown()  # writes the line
    os._exit(1)


def set_allocator() -> None:
    """Choose growing segments, unless the environment has settings or torch was imported before.

    torch reads the variable while it is imported, so this function is called before. Such segments
    need Linux, but not WSL, where the driver fails at their first allocation (pytorch issue
    192330).
    """
    chosen = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    native = sys.platform == "linux" and "microsoft" not in platform.release().lower()
    if native and "torch" not in sys.modules and not chosen:
        os.environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR
