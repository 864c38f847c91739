"""Attention of one layer on a CUDA device: every backend of ours, checked, then timed.

Heads of Qwen3-0.6B (16 query heads, 8 KV heads, head size 128 or --dim), bfloat16, random keys. All
implementations compute the same batch; one that differs from the float32 reference is not timed.
TFLOP/s count 4 * heads * head size for each visible (query, key) pair; masked pairs do not count.
The ceiling is torch's own matrix product in the same run.

    python -P bench/attention.py            # both workloads
    python -P bench/attention.py --cached   # with the shared prefix in pages
    python -P bench/attention.py --trial    # with small sizes; nothing is kept
    python -P bench/attention.py --device cpu  # a trial without a card
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from ceiling import product_seconds
from clock import median_seconds
from in_time import seconds_left
from report import keep

from gpuscore.backends.common.hf_config import DecoderConfig, Rope
from gpuscore.backends.torch.attention.choice import attention_factory, choose_attention
from gpuscore.backends.torch.attention.operators import TorchAttention
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.errors import ConfigError
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack
from gpuscore_kernels.partial_attention import merge_partials

Sizes: TypeAlias = tuple[int, int, int]  # tokens of the query, items, tokens of an item
WORKLOADS: dict[str, Sizes] = {"2000 + 500 x 20": (2000, 500, 20), "120 + 10 x 180": (120, 10, 180)}
Row: TypeAlias = dict[str, Any]
TRIAL: dict[str, Sizes] = {"130 + 4 x 5": (130, 4, 5)}
HEADS, KV_HEADS, PAGE = 16, 8, 64
TOLERANCE = 2e-2
OURS = ("triton", "flashinfer")
ON_CPU = ("torch", "triton")


def model_of(dim: int) -> DecoderConfig:
    """Return a model whose heads have `dim` elements."""
    return DecoderConfig(
        architecture="",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        rms_norm_eps=1e-6,
        rope=Rope(1e4),
        max_position_embeddings=1,
        windows=(None, None),
        attention_scale=dim**-0.5,
        tie_word_embeddings=True,
        checkpoint_dtype="bfloat16",
    )


def make_batch(prefix: int, items: int, length: int, cached: bool) -> PackedBatch:
    tokens = np.zeros(length, np.int32)
    pages = np.arange(-(-prefix // PAGE) if cached else 0, dtype=np.int32)
    first = [] if cached else [Segment(np.zeros(prefix, np.int32), 0, 0)]
    parent, label = len(first) - 1, np.zeros(1, np.int32)
    rest = [Segment(tokens, prefix, 0, parent=parent, label_ids=label) for _ in range(items)]
    return pack(first + rest, [Prefix(prefix if cached else 0, pages)])


def visible_pairs(prefix: int, items: int, length: int, cached: bool) -> int:
    own = items * (length * prefix + length * (length + 1) // 2)
    return own + (0 if cached else prefix * (prefix + 1) // 2)


Way: TypeAlias = tuple[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Layer:
    """Inputs of one layer, and the expected outputs."""

    model: DecoderConfig
    batch: PackedBatch
    pool: KVPool
    rows: tuple[Tensor, Tensor, Tensor]  # q, k and v
    expected: Tensor

    @classmethod
    def random(cls, model: DecoderConfig, batch: PackedBatch, device: torch.device) -> "Layer":
        generator = torch.Generator(device).manual_seed(0)
        pools = [KVPool(model, 64, PAGE, kind, device) for kind in (torch.bfloat16, torch.float32)]
        for side in range(2):
            pools[0].layers[0][side].normal_(generator=generator)
            pools[1].layers[0][side].copy_(pools[0].layers[0][side])
        q, k, v = (
            torch.randn(batch.num_tokens, h, model.head_dim, generator=generator, device=device)
            for h in (HEADS, KV_HEADS, KV_HEADS)
        )
        rows = q.bfloat16(), k.bfloat16(), v.bfloat16()
        exact = TorchAttention(model, pools[1], "reference", merge_partials).prepare(batch)
        return cls(model, batch, pools[0], rows, exact.run(0, *(x.float() for x in rows)))

    def ways(self) -> Iterator[Way]:
        """Yield all implementations that run on this device."""
        device = self.pool.device
        for way in OURS if device.type == "cuda" else ON_CPU:
            try:
                choose_attention(way, self.model, device, torch.bfloat16, False)
            except ConfigError as error:
                print(f"  {way:20} {error}")
                continue
            make = attention_factory(way, self.model, device, torch.bfloat16, merge_partials, None)
            planned = make(self.model, self.pool).prepare(self.batch)
            yield way, partial(planned.run, 0, *self.rows)


def measure(
    name: str, layer: Layer, ways: Iterator[Way], flops: int, cached: bool, repeat: int
) -> Iterator[Row]:
    """Yield a row for each implementation that is right on this device."""
    print(f"{name}{', prefix cached' if cached else ''}: {layer.batch.num_tokens} rows")
    for way, run in ways:
        error = float((run().float() - layer.expected).norm() / layer.expected.norm())
        if not error <= TOLERANCE:
            print(f"  {way:26} relative error {error:.1e}: not timed")
            continue
        ms = 1e3 * median_seconds(run, layer.pool.device, repeat, warm=2)
        rate = flops / ms / 1e9
        print(f"  {way:26} {ms:8.3f} ms {rate:8.1f} TFLOP/s   relative error {error:.1e}")
        yield {
            **{"workload": name, "dim": layer.model.head_dim, "cached": cached, "way": way},
            **{"ms": ms, "TFLOP/s": rate, "relative error": error},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention kernels on a CUDA device.")
    parser.add_argument("--cached", action="store_true", help="the shared prefix is cached")
    parser.add_argument("--dim", type=int, default=128, help="elements of a head")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trial", action="store_true", help="small sizes; always on a CPU")
    parser.add_argument("--output", type=Path, help="file that gets each row as a line of JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    card = device.type == "cuda"
    trial = options.trial or not card
    if card and not torch.cuda.is_available():
        sys.exit("this bench measures kernels for CUDA; torch sees no CUDA device here")
    with torch.inference_mode():
        name = torch.cuda.get_device_name(device) if card else "cpu"
        print(f"{name}, torch {torch.__version__}")
        side = 256 if trial else 8192
        seconds = product_seconds(side, side, side, torch.bfloat16, device)
        print(f"ceiling ({side}^3 matrix product): {2 * side**3 / seconds / 1e12:.3g} TFLOP/s")
        for workload, sizes in (TRIAL if trial else WORKLOADS).items():
            if seconds_left() <= 0:
                sys.exit(f"no time is left for {workload}")
            batch = make_batch(*sizes, options.cached)
            layer = Layer.random(model_of(options.dim), batch, device)
            flops = 4 * HEADS * options.dim * visible_pairs(*sizes, options.cached)
            repeat = 2 if trial else 30
            for row in measure(workload, layer, layer.ways(), flops, options.cached, repeat):
                if options.output or not trial:
                    keep("attention", {"bench": "attention", "device": name} | row, options.output)


if __name__ == "__main__":
    main()
