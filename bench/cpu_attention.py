"""Speed and error of attention in C on a CPU, of two workloads: GFLOP per CPU-second of one thread.

Usage: python -P bench/cpu_attention.py [DTYPE]

Heads are Qwen3-0.6B's; only scores that a row sees count. CPU-seconds vary less than seconds on a
machine with other work; results are compared with float64 first.
"""

import sys
from pathlib import Path
from statistics import median
from time import process_time

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpuscore.backends.torch.attention.plain import TorchAttention
from gpuscore.backends.torch.compiler import cc
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.types.batch import visible_rows
from gpuscore_kernels.row_functions import AttentionFunctions, build
from support.attention_inputs import heads_alone
from support.batches import in_one_batch

HEADS, KV_HEADS, DIM = 16, 8, 128
WORKLOADS = {"500 + 77 x 20": (500, 77, 20), "120 + 10 x 180": (120, 10, 180)}
CONFIG = heads_alone(HEADS, KV_HEADS, DIM)


def main(dtype: torch.dtype) -> None:
    """Print a line for each workload."""
    attend = AttentionFunctions(build(cc(), dtype), dtype).extend_attention
    torch.set_num_threads(1)
    for name, (query, items, length) in WORKLOADS.items():
        batch = in_one_batch([0] * query, [[0] * length] * items, [0])
        pool = KVPool(CONFIG, 1, 16, dtype, torch.device("cpu"))
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
