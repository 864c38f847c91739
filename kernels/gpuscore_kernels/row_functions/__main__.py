"""The compilation ahead, for an image: python -m gpuscore_kernels.row_functions [COMPILER]."""

import sys

from gpuscore_kernels.row_functions.build import build_ahead

for library in build_ahead(sys.argv[1] if len(sys.argv) > 1 else "gcc"):
    print(library)
