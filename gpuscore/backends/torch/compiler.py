"""Fusion of element-wise work by torch.compile, if it pays and there is a C++ compiler.

Eager torch writes every intermediate result to memory. A compiled group, such as norm + rotary
embedding, reads and writes once. Matrix products and attention are not compiled.
"""

import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch

from gpuscore.errors import ConfigError

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., Any]
Compiler: TypeAlias = Callable[[Function], Function]

_VECTOR_FLAGS = (
    *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw"),
    *("-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)
WORTHWHILE_PARAMETERS = 100_000_000  # for smaller models, compiling takes longer than most runs


def use_compiler(wanted: str, device: torch.device, num_parameters: int) -> bool:
    """True if functions are to be compiled; raises ConfigError if wanted but not possible."""
    if wanted == "off" or (wanted == "auto" and num_parameters < WORTHWHILE_PARAMETERS):
        return False
    if device.type != "cpu":
        if wanted == "on":
            raise ConfigError(f"--compile on: device is {device.type}; supported: cpu")
        return False
    compiler = cxx()
    if shutil.which(compiler) is None:
        if wanted == "on":
            raise ConfigError(f"--compile on: there is no C++ compiler {compiler}; install g++")
        logger.warning("no C++ compiler %s: element-wise work runs eagerly, slower", compiler)
        return False
    return True


def prepare() -> None:
    """Import torch's compiler, which takes seconds, and spare it what it does at every start.

    It would start processes that each import torch, although functions are compiled one after the
    other, and compile a program for each set of vector instructions to see if one can. Variables of
    the environment, TORCHINDUCTOR_COMPILE_THREADS and TORCHINDUCTOR_VEC_ISA_OK, come first. torch
    keeps these settings for each thread, so call this in the one that compiles.
    """
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = 1
    if config.cpp.vec_isa_ok is None and _knows_vectors():
        config.cpp.vec_isa_ok = True
    import_module("torch._inductor.compile_fx")


def _knows_vectors() -> bool:
    """True if the C++ compiler takes the flags of all vector instructions that torch may choose."""
    if platform.machine() != "x86_64":
        return False  # torch tries nothing there
    command = [cxx(), *_VECTOR_FLAGS, "-x", "c++", "-E", "-"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode == 0


def cxx() -> str:
    return os.environ.get("CXX") or "g++"  # the one that torch.compile takes


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
