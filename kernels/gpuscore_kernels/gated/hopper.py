"""A gate-up product that writes act(gate) * up itself: quack-kernels' kernel for Hopper.

One kernel per activation serves any number of rows and any sizes. It takes a weight's rows as they
are, all of the gate first: its loads bring rows of the gate and of the up projection in turn, so
that a thread has both results of a column, in float32.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from gpuscore_kernels import ahead
from gpuscore_kernels.gated import ACTIVATIONS, check_activation

MULTIPLE = 8  # of elements in a row of x, weight and result: copies need rows at 16 bytes
NAMES = {"silu": "swiglu", "gelu_tanh": "geglu"}  # of activations, in quack-kernels
# Two groups of warps take turns on tiles; the two tiles of a cluster stand side by side, so that
# few rows leave none idle. The fastest of four on an H200.
TILES = {"tile_m": 128, "tile_n": 192, "cluster_m": 1, "cluster_n": 2, "pingpong": True}


def why_not(activation: str) -> str | None:
    """Say why there is no kernel for an activation here; None if there is one."""
    return ahead.why_not(__name__, ACTIVATIONS.index(activation))


def gated_product(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Return act(x gate') * (x up'), on Hopper.

    Args:
        x: [T, K], bfloat16, contiguous.
        weight: [2I, K], bfloat16, contiguous: the gate's rows, then the up projection's. K and I
            are multiples of `MULTIPLE`.
        activation: as in `gated`.

    Returns:
        [T, I] in bfloat16; products and activation in float32, rounded once.
    """
    check_activation(activation)
    out = x.new_empty(len(x), len(weight) // 2)
    if out.numel() == 0:
        return out
    kernel, clusters = _loaded(activation, x.device)
    # No products as they are, and nothing added to them; no lengths, no scales of eight bits.
    scheduler = clusters, None, 8, None, None, None
    kernel(x, weight, None, None, (out, None, None), scheduler, None, None, None)
    return out


@functools.cache
def _loaded(activation: str, device: torch.device) -> tuple[ahead.Kernel, int]:
    """Return the kernel, and how many clusters run at a time."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return ahead.load(__name__, ACTIVATIONS.index(activation)), processors // 2


def compile_kernel(activation: int) -> Any:
    """Compile the kernel for `ACTIVATIONS[activation]`, without a card."""
    import quack.gemm_runtime.host
    from cutlass import cute
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_gated
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: list[Any] = []
    compile_now = cute.compile

    def keep(*given: Any, **named: Any) -> Any:
        made.append(compile_now(*given, **named))
        return lambda *given, **named: None  # there is no card to call it on

    cute.compile = keep
    quack.gemm_runtime.host.get_max_active_clusters = lambda size: size  # only calls take it
    config = GemmConfig(**TILES, is_dynamic_persistent=False)
    with FakeTensorMode():
        x = torch.empty(8, 8, dtype=torch.bfloat16, device=torch.device("cuda:0"))
        name = NAMES[ACTIVATIONS[activation]]
        given = {"activation": name, "store_preact": False, "concat_layout": ("B",)}
        gemm_gated(x, x.new_empty(16, 8).t(), tuned=False, config=config, **given)
    (compiled,) = made
    return compiled
