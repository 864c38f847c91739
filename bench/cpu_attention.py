"""Speed and error of attention in C on a CPU, of two workloads: GFLOP per CPU-second of one thread.

Usage: python -P bench/cpu_attention.py [DTYPE]

Heads are Qwen3-0.6B's; only scores that a row sees count. CPU-seconds vary less than seconds on a
machine with other work; results are compared with float64 first.
"""

import sys
from statistics import median
from time import process_time

import numpy as np
import torch

from gpuscore.backends.common.hf_config import DecoderConfig, Rope
from gpuscore.backends.torch.attention.plain import TorchAttention
from gpuscore.backends.torch.compiler import cc
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack, visible_rows
from gpuscore_kernels.row_functions import AttentionFunctions, build

HEADS, KV_HEADS, DIM = 16, 8, 128
WORKLOADS = {"500 + 77 x 20": (500, 77, 20), "120 + 10 x 180": (120, 10, 180)}
CONFIG = DecoderConfig(
    architecture="",
    vocab_size=1,
    hidden_size=1,
    intermediate_size=1,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    rms_norm_eps=1e-6,
    rope=Rope(1e4),
    max_position_embeddings=1,
    windows=(None, None),
    attention_scale=DIM**-0.5,
    tie_word_embeddings=True,
    checkpoint_dtype="float32",
)


def batch_of(query: int, items: int, length: int) -> PackedBatch:
    """Return a query with items of one length."""
    zeros = np.zeros(max(query, length), np.int32)
    segments = [Segment(zeros[:query], 0, 0)]
    segments += [Segment(zeros[:length], query, 0, 0, label_ids=zeros[:1])] * items
    return pack(segments, [Prefix(0, zeros[:0])])


def main(dtype: torch.dtype) -> None:
    """Print a line for each workload."""
    attend = AttentionFunctions(build(cc(), dtype), dtype).extend_attention
    torch.set_num_threads(1)
    for name, sizes in WORKLOADS.items():
        batch, pool = batch_of(*sizes), KVPool(CONFIG, 1, 16, dtype, torch.device("cpu"))
        seen = torch.from_numpy(visible_rows(batch))
        q, k, v = (torch.randn(n, len(seen), DIM).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        tested = TorchAttention(CONFIG, pool, attend).prepare(batch)
        rows = [x.transpose(0, 1) for x in (q, k, v)]
        wide = [x.double().repeat_interleave(HEADS // len(x), 0) for x in (q, k, v)]
        scores = (wide[0] @ wide[1].mT * DIM**-0.5).masked_fill_(~seen, -torch.inf)
        exact = (scores.softmax(-1) @ wide[2]).transpose(0, 1)
        error = float((tested.run(0, *rows) - exact).norm() / exact.norm())
        seconds = []
        for _ in range(30):
            begin = process_time()
            tested.run(0, *rows)
            seconds.append(process_time() - begin)
        work = 4e-9 * DIM * HEADS * int(seen.sum())
        print(
            f"{name}: best {work / min(seconds):.0f}, median {work / median(seconds):.0f} GFLOP "
            f"per CPU-second in {dtype}; relative error {error:.1e}"
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main(getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "bfloat16"))
