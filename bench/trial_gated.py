"""A trial: quack-kernels' product with SwiGLU inside, beside torch's product and our `gated`.

    python -P bench/trial_gated.py --compile DIR               # no card; the packages below
    python -P bench/trial_gated.py --run DIR --output FILE     # a card; apache-tvm-ffi

The first needs quack-kernels 0.6.5 and nvidia-cutlass-dsl 4.8.1. Sizes are those of a layer of
Qwen3-0.6B with the rows of 2,000 + 500 x 20.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from trial_objects import Kernel, compare, main

from gpuscore_kernels.gated import gated

ROWS, HIDDEN, INNER = 12_000, 1024, 3072
INPUTS, SAMPLE = 4, 512
MULTIPROCESSORS = 132
# Rows and columns of a tile, whether two warp groups take turns on tiles, and tiles of a cluster.
VARIANTS = (
    "128x192 pingpong 2x1",
    "128x192 pingpong 1x2",
    "256x192 together 2x1",
    "256x160 together 2x1",
)


def compile_kernel(name: str) -> Any:
    """Compile the kernel without a card."""
    os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "QUACK_CACHE_ENABLED": "0"}
    import quack.gemm_runtime.host
    from cutlass import cute
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_gated
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: list[Any] = []
    compile_now = cute.compile

    def keep(*given: Any, **named: Any) -> Kernel:
        made.append(compile_now(*given, **named))
        return lambda *given, **named: None  # there is no card to call it on

    cute.compile = keep
    quack.gemm_runtime.host.get_max_active_clusters = lambda size: MULTIPROCESSORS // size
    tile, turns, cluster = name.split()
    rows, columns, down, across = map(int, f"{tile}x{cluster}".split("x"))
    cut = {"tile_m": rows, "tile_n": columns, "cluster_m": down, "cluster_n": across}
    config = GemmConfig(**cut, pingpong=turns == "pingpong", is_dynamic_persistent=False)
    with FakeTensorMode():
        x = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device=torch.device("cuda:0"))
        weight = x.new_empty(2 * INNER, HIDDEN).t()
        given = {"activation": "swiglu", "store_preact": False, "concat_layout": ("B",)}
        gemm_gated(x, weight, tuned=False, config=config, **given)
    cute.compile = compile_now
    (compiled,) = made
    return compiled


def call(kernel: Kernel, x: Tensor, weight: Tensor) -> Tensor:
    """Call a loaded kernel, whose clusters all have two tiles."""
    out = x.new_empty(len(x), INNER)
    scheduler = MULTIPROCESSORS // 2, None, 8, None, None, None
    # No products as they are, and nothing added to them; no lengths, no scales of eight bits.
    kernel(x, weight, None, None, (out, None, None), scheduler, None, None, None)
    return out


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return gated(functional.linear(x, weight), "silu", impl="triton")


def run(loaded: Mapping[str, Kernel], output: Path) -> bool:
    """Check and time kernels; return whether all were right."""
    given: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    sets = [
        (torch.randn(ROWS, HIDDEN, **given), torch.randn(2 * INNER, HIDDEN, **given) / HIDDEN**0.5)
        for _ in range(INPUTS)
    ]
    sample = torch.randperm(ROWS, device="cuda")[:SAMPLE]
    x, weight = (x.double() for x in sets[0])
    gate, up = (x[sample] @ part.T for part in weight.split(INNER))
    ways = {"ours": [partial(ours, *inputs) for inputs in sets]}
    for name, kernel in loaded.items():
        ways[name] = [partial(call, kernel, *inputs) for inputs in sets]
    expected = functional.silu(gate) * up
    return compare(f"{ROWS} rows", ways, expected, sample, output)


if __name__ == "__main__":
    main("gated", VARIANTS, compile_kernel, run)
