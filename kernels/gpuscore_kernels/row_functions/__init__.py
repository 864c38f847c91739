from gpuscore_kernels.row_functions.build import FORMATS, BuildError, build, built_ahead, load
from gpuscore_kernels.row_functions.delta import DeltaFunctions
from gpuscore_kernels.row_functions.functions import RowFunctions

__all__ = [
    "FORMATS",
    "BuildError",
    "DeltaFunctions",
    "RowFunctions",
    "build",
    "built_ahead",
    "load",
]
