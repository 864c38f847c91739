"""Description of the processor and the environment variables with which a result was made."""

import os
import re
from typing import Any

from gpuscore.system.machine import local_machine

# What XLA and libtpu read; some of their flags change the order of sums.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")


def environment() -> dict[str, str]:
    """Return the variables that affect scores and are set; local paths in them are left out."""
    return {
        name: re.sub(r"=\S*[/\\]\S*", "=PATH", os.environ[name])
        for name in _VARIABLES
        if os.environ.get(name)
    }


def hardware(framework: str) -> dict[str, Any]:
    """Describe the CPU, and a GPU that torch finds or a TPU that JAX finds.

    The description has no names of machines or users.
    """
    import torch

    machine = local_machine() | {"threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    if framework == "jax":
        import jax

        if jax.default_backend() == "tpu":
            machine["tpu"] = jax.devices()[0].device_kind
    return machine


def hardware_text(machine: object) -> str:
    """Return the processor in a description by `hardware`; "unknown" for other descriptions."""
    parts = machine if isinstance(machine, dict) else {}
    named = [str(parts[name]) for name in ("tpu", "gpu", "cpu") if name in parts]
    return ", ".join(named) or "unknown"
