"""The choice of functions in C for attention and element-wise work on a CPU (`--compile`).

Eager torch writes every intermediate result to memory. A function in C, such as norm + rotary
embedding, reads and writes once. Matrix products stay with torch.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from gpuscore.errors import ConfigError
from gpuscore_kernels.row_functions.build import find_prebuilt

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., Any]
FunctionT = TypeVar("FunctionT", bound=Function)

WORTHWHILE_PARAMETERS = 1_000_000  # a smaller model starts without compiling for a second


class Compiler(Protocol):
    """Returns a faster form of a function."""

    def __call__(self, function: FunctionT, /) -> FunctionT: ...


def use_compiler(
    setting: str, device: torch.device, dtype: torch.dtype, num_parameters: int
) -> bool:
    """True if functions are to be compiled; raises ConfigError if the setting is not possible."""
    if setting == "off" or (setting == "auto" and num_parameters < WORTHWHILE_PARAMETERS):
        return False
    reason = _why_not(device, dtype)
    if reason is None:
        return True
    if setting == "on":
        raise ConfigError(f"--compile on: {reason}")
    if device.type == "cpu":
        logger.warning("attention and element-wise work run in plain torch, slowly: %s", reason)
    return False


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"device is {device.type}; supported: cpu"
    if sys.platform != "linux":
        return f"the system is {sys.platform}; supported: linux"
    if shutil.which(cc()) is None and find_prebuilt(dtype) is None:
        return f"there is no C compiler {cc()}; install gcc"
    return None


def cc() -> str:
    return os.environ.get("CC") or "gcc"


def eagerly(function: FunctionT, /) -> FunctionT:
    """Return the function unchanged: the compiler that does nothing."""
    return function
