"""Triton kernels against plain torch on a CUDA device: time and bytes per second.

    python bench/kernels.py                     # 12,000 rows of Qwen3-0.6B's shape
    python bench/kernels.py --rows 1920
    python bench/kernels.py --trial        # few rows, nothing is kept
    python bench/kernels.py --device cpu    # a trial without a card: plain torch twice

Each result is compared with the reference before it is timed. Bytes are those that must be read and
written once; compare a rate with the copy rate of the same run, the memory's ceiling. The mixture
of experts is one layer of Qwen3-30B-A3B, whose products take longer than its bytes.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from ceiling import copy_rate
from clock import median_seconds
from report import keep, table

from gpuscore_kernels.add_rms_norm import add_rms_norm
from gpuscore_kernels.expert_mlp import expert_mlp
from gpuscore_kernels.gated import gated
from gpuscore_kernels.label_head import label_logits, vocab_statistics
from gpuscore_kernels.qk_norm_rope_store import qk_norm_rope_store
from gpuscore_kernels.routing import route

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
VOCAB, TRIAL_VOCAB = 151936, 4096
MIXTURE, TRIAL_MIXTURE = (128, 8, 2048, 768), (4, 2, 64, 48)  # experts, top k, width, inner
DTYPE = torch.bfloat16
TOLERANCE = 5e-3
# Name, bytes, and a function that takes the implementation's name and runs it.
Case: TypeAlias = tuple[str, int, Callable[[str], tuple[Tensor, ...]]]


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench/kernels.py needs a CUDA device; this torch sees none")
        return 1
    vocab, mixture = VOCAB, MIXTURE
    if options.trial:
        options.rows, options.scored, options.repeat = 64, 8, 2
        vocab, mixture = TRIAL_VOCAB, TRIAL_MIXTURE
    # No implementation of ours for a CPU covers all of these.
    own = "triton" if device.type == "cuda" else "reference"
    copy = copy_rate(device, 1 << 22 if options.trial else 1 << 30) / 1e9
    rows = []
    for name, size, run in cases(options.rows, options.scored, vocab, mixture, device):
        check(name, run(own), run("reference"))
        ours, plain = (
            1e3 * median_seconds(partial(run, i), device, options.repeat, warm=3)
            for i in (own, "reference")
        )
        rows.append(
            {
                "kernel": name,
                "ms": round(ours, 4),
                "GB/s": round(size / ours / 1e6),
                "of copy": f"{size / ours / 1e6 / copy:.0%}",
                "torch ms": round(plain, 4),
            }
        )
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{card}, {options.rows} rows, {options.scored} scored; copy {copy:.0f} GB/s")
    print(table(rows))
    found = {
        "bench": "kernels",
        "device": card,
        "rows": options.rows,
        "scored": options.scored,
        "copy GB/s": round(copy),
        "kernels": rows,
    }
    if options.output or not options.trial:
        keep("kernels", found, options.output)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12000)
    parser.add_argument("--scored", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trial", action="store_true", help="few rows; always on a CPU")
    parser.add_argument("--output", type=Path, help="file that gets the result as a line of JSON")
    options = parser.parse_args()
    options.trial |= options.device == "cpu"
    return options


def cases(
    rows: int, scored: int, vocab: int, mixture: tuple[int, int, int, int], device: torch.device
) -> Iterator[Case]:
    randn = partial(torch.randn, device=device, dtype=DTYPE)
    x, delta, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), 1 + randn(HIDDEN)
    yield (
        "add_rms_norm",
        4 * x.nbytes,
        lambda impl: add_rms_norm(x, delta, weight, eps=1e-6, impl=impl),
    )
    gate_up = randn(rows, 2 * INNER)
    yield "gated", gate_up.nbytes * 3 // 2, lambda impl: (gated(gate_up, "silu", impl=impl),)
    qkv, norm = randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM), 1 + randn(HEAD_DIM)
    angles = torch.randn(rows, HEAD_DIM // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    yield (
        "qk_norm_rope_store",
        2 * qkv.nbytes + 2 * cos.nbytes,
        lambda impl: qk_norm_rope_store(
            qkv,
            cos,
            sin,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            q_norm=norm,
            k_norm=norm,
            eps=1e-6,
            impl=impl,
        ),
    )
    hidden, head = randn(scored, HIDDEN), randn(vocab, HIDDEN) / HIDDEN**0.5
    labels = torch.randint(0, vocab, (2 * scored,), device=device)
    own = torch.arange(scored, device=device).repeat_interleave(2)
    yield (
        "label_logits",
        4 * scored * HIDDEN * hidden.itemsize,
        lambda impl: (label_logits(hidden, head, own, labels, impl=impl),),
    )
    yield (
        "vocab_statistics",
        head.nbytes,
        lambda impl: vocab_statistics(hidden, head, num_top=0, impl=impl)[:1],
    )
    yield mixture_case(rows, mixture, device)


def mixture_case(rows: int, sizes: tuple[int, int, int, int], device: torch.device) -> Case:
    experts, top_k, width, inner = sizes
    randn = partial(torch.randn, device=device, dtype=DTYPE)
    x, logits = randn(rows, width), torch.randn(rows, experts, device=device)
    gate_up = randn(experts, 2 * inner, width) / width**0.5
    down = randn(experts, width, inner) / inner**0.5

    def run(impl: str) -> tuple[Tensor, ...]:
        routing = route(logits, top_k=top_k, norm_top_k=True, impl=impl)
        return (expert_mlp(x, routing, gate_up, down, "silu", impl=impl),)

    return "mixture of experts", gate_up.nbytes + down.nbytes + 2 * x.nbytes, run


def check(name: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


if __name__ == "__main__":
    sys.exit(main())
