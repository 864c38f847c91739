"""Fusing element-wise work with torch.compile, where that pays and a C++ compiler is found.

Eager torch writes every intermediate result to memory; compiled, a group such as norm + rotary
embedding reads and writes once. Matrix products and attention are not compiled.
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

WORTHWHILE_PARAMETERS = 100_000_000  # below, compiling takes longer than most runs


def use_compiler(wanted: str, device: torch.device, num_parameters: int) -> bool:
    """Whether to compile; raises ConfigError if that was asked for and is not possible."""
    if wanted == "off" or (wanted == "auto" and num_parameters < WORTHWHILE_PARAMETERS):
        return False
    if device.type != "cpu":
        if wanted == "on":
            raise ConfigError(f"--compile on: device is {device.type}; supported: cpu")
        return False
    compiler = os.environ.get("CXX") or "g++"  # where torch.compile looks
    if shutil.which(compiler) is None:
        if wanted == "on":
            raise ConfigError(f"--compile on: there is no C++ compiler {compiler}; install g++")
        logger.warning("no C++ compiler %s: element-wise work runs eagerly, slower", compiler)
        return False
    return True


def eagerly(function: Function) -> Function:
    """The compiler that does nothing."""
    return function


def compiled(function: Function) -> Function:
    """`function` compiled once for any number of rows, the first dimension of its arguments."""
    fast = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        # torch.compile would specialise on 0 and 1 rows: once more compiling, in mid-traffic.
        return (fast if len(arguments[0]) > 1 else function)(*arguments)

    return run
