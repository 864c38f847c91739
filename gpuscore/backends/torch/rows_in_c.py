"""C forms of the decoder's row-wise functions; the check at start compares both."""

from typing import cast

import torch

from gpuscore.backends.torch.compiler import Compiler, Function, cc
from gpuscore.backends.torch.layers import norm_and_rotate
from gpuscore.backends.torch.linear import scaled, unsigned
from gpuscore.errors import ConfigError
from gpuscore_kernels.delta_net.reference import convolve, delta_rule, gated_norm, keep_tails
from gpuscore_kernels.extend_attention.reference import extend_attention
from gpuscore_kernels.label_head import few_products
from gpuscore_kernels.quantized import EPS
from gpuscore_kernels.reference import add_and_norm, gated, rms_norm
from gpuscore_kernels.row_functions.attention import AttentionFunctions
from gpuscore_kernels.row_functions.build import BuildError, build, find_prebuilt, load
from gpuscore_kernels.row_functions.delta import DeltaFunctions
from gpuscore_kernels.row_functions.functions import RowFunctions


def in_c(dtype: torch.dtype) -> Compiler:
    """Compile the functions for rows of `dtype`.

    Returns:
        a function that returns the C form of a function that is named below.

    Raises:
        ConfigError: the functions cannot be compiled or loaded.
    """
    try:
        ahead = find_prebuilt(dtype)
        library = build(cc(), dtype) if ahead is None else load(ahead)
    except BuildError as error:
        raise ConfigError(f"{error}; choose --compile off, or another compiler in CC") from error
    rows = RowFunctions(library, dtype)
    linear = DeltaFunctions(library, dtype)
    forms: dict[Function, Function] = {
        rms_norm: rows.rms_norm,
        add_and_norm: rows.add_and_norm,
        norm_and_rotate: rows.norm_and_rotate,
        gated: rows.gated,
        unsigned: lambda x: rows.quantize_rows(x, EPS),
        few_products: rows.products if dtype == torch.bfloat16 else few_products,
        scaled: lambda y, scale, bias, dtype: rows.scale_rows(y, scale, bias),
        convolve: linear.convolve,
        keep_tails: keep_tails,  # few rows
        delta_rule: linear.delta_rule,
        gated_norm: linear.gated_norm,
        extend_attention: AttentionFunctions(library, dtype).extend_attention,
    }
    return cast(Compiler, forms.__getitem__)
