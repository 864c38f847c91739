"""Fusion of element-wise work by torch.compile, if it pays and there is a C++ compiler.

Eager torch writes every intermediate result to memory. A compiled group, such as norm + rotary
embedding, reads and writes once. Matrix products and attention are not compiled.
"""

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from gpuscore.errors import ConfigError

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., Any]
Compiler: TypeAlias = Callable[[Function], Function]

WORTHWHILE_PARAMETERS = 100_000_000  # for smaller models, compiling takes longer than most runs


def use_compiler(wanted: str, device: torch.device, num_parameters: int) -> bool:
    """True if functions are to be compiled; raises ConfigError if wanted but not possible."""
    if wanted == "off" or (wanted == "auto" and num_parameters < WORTHWHILE_PARAMETERS):
        return False
    if device.type != "cpu":
        if wanted == "on":
            raise ConfigError(f"--compile on: device is {device.type}; supported: cpu")
        return False
    compiler = os.environ.get("CXX") or "g++"  # the one that torch.compile takes
    if shutil.which(compiler) is None:
        if wanted == "on":
            raise ConfigError(f"--compile on: there is no C++ compiler {compiler}; install g++")
        logger.warning("no C++ compiler %s: element-wise work runs eagerly, slower", compiler)
        return False
    return True


def eagerly(function: Function) -> Function:
    """Return the function unchanged: the compiler that does nothing."""
    return function


def compiled(function: Function) -> Function:
    """Compile `function` once for any number of rows, the first dimension of its arguments."""
    fast = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        # torch.compile specialises on 0 and 1 rows, and would compile again during traffic.
        return (fast if len(arguments[0]) > 1 else function)(*arguments)

    return run
