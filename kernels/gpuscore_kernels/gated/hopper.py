"""A gate-up product that writes silu(gate) * up itself: quack-kernels' kernel for Hopper.

It serves all sizes, and reads rows of gate and up in turn.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from gpuscore_kernels import ahead

# Two groups of warps take turns on tiles; the two tiles of a cluster stand side by side, so that
# few rows leave none idle. The fastest of four on an H200.
TILES = {"tile_m": 128, "tile_n": 192, "cluster_m": 1, "cluster_n": 2, "pingpong": True}
# Of an MLP. Fewer are faster with `gated` behind a plain product: on an H200 0.0139 ms against
# 0.0157 for 300 rows of Qwen3-0.6B and 0.097 against 0.131 of Qwen3-8B, 0.0280 against 0.0231 and
# 0.281 against 0.270 for 1,000 (bench/LOG.md).
FEWEST_ROWS = 1000


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up, float32 inside and rounded once.

    Args:
        x: [T, K] in bfloat16, contiguous.
        weight: [2I, K] in bfloat16, contiguous: the gate's rows, then those of up; 8 divides K, I.
    """
    out = x.new_empty(len(x), len(weight) // 2)
    if len(x):
        kernel, clusters = _loaded(x.device)
        scheduler = clusters, None, 8, None, None, None  # and no plain product, lengths, scales
        kernel(x, weight, None, None, (out, None, None), scheduler, None, None, None)
    return out


@functools.cache
def _loaded(device: torch.device) -> tuple[ahead.Kernel, int]:
    """Return the kernel, and how many clusters run at a time."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return ahead.load(__name__), processors // 2


def compile_kernel() -> Any:
    """Compile the kernel, without a card."""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_gated
    from quack.gemm_runtime import host
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: list[Any] = []
    host.get_max_active_clusters = lambda size: size  # there is no card to ask, nor to launch on
    host.launch_gemm = lambda plan, *given: made.append(plan.compiled_fn)
    config = GemmConfig(**TILES, is_dynamic_persistent=False)
    given = {"activation": "swiglu", "store_preact": False, "concat_layout": ("B",)}
    with FakeTensorMode():
        x = torch.empty(8, 8, dtype=torch.bfloat16, device="cuda:0")
        gemm_gated(x, x.new_empty(16, 8).t(), tuned=False, config=config, **given)
    return made[0]
