"""The forms of attention on a CPU: plain torch, and C for several kinds of CPUs."""

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from gpuscore.backends.torch.compiler import Function, cc
from gpuscore_kernels.extend_attention.reference import extend_attention
from gpuscore_kernels.row_functions.attention import AttentionFunctions
from gpuscore_kernels.row_functions.build import LEVELS, SOURCES, compile_library, load

# Machines that the C code is compiled for: the levels of an image, the oldest CPU and this one.
MACHINES = ("native", *LEVELS, "x86-64")


def runs_here(machine: str) -> bool:
    known = torch.cpu.get_capabilities()
    return all(known.get(name) for name in LEVELS.get(machine, ()))


@cache
def form(machine: str, dtype: torch.dtype, *flags: str) -> Function:
    """Return the reference ("plain"), or its form in C for a machine, compiled once."""
    if machine == "plain":
        return extend_attention
    library = Path(mkdtemp(prefix="gpuscore-attention-"), "rows.so")
    compile_library(cc(), machine, dtype, SOURCES, library, flags)
    return AttentionFunctions(load(library), dtype).extend_attention


native = partial(form, "native")
