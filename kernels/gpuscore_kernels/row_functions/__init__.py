"""Functions on rows of tensors, written in C for CPUs, with the compiler that builds them."""

from gpuscore_kernels.row_functions.attention import KEYS, AttentionFunctions
from gpuscore_kernels.row_functions.build import FORMATS, BuildError, build, find_prebuilt, load
from gpuscore_kernels.row_functions.delta import DeltaFunctions
from gpuscore_kernels.row_functions.functions import RowFunctions

__all__ = [
    "FORMATS",
    "KEYS",
    "AttentionFunctions",
    "BuildError",
    "DeltaFunctions",
    "RowFunctions",
    "build",
    "find_prebuilt",
    "load",
]
