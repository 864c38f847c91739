"""The least time a workload can take on this CPU: counted operations over measured rates.

Counted is what a packed, decode-free forward pass with a pruned last layer has to compute: every
linear layer for all tokens but, in the last layer, queries, output projection and MLP for one row
per item; attention of every row over what it sees; the LM head for one row per item.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

ROWS = 2048  # of a batch of linear layers


def operations(shape: Mapping[str, int], query: int, items: int, length: int) -> dict[str, float]:
    """Multiplications and additions of each kind, by the names of `rates`."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    layers, dim = shape["num_hidden_layers"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    tokens, scored = query + items * length, items
    kv, rest = 2 * kv_heads * dim, 2 * heads * dim + 3 * inner
    per_pair = 4 * heads * dim
    own = query**2 / 2 + items * length**2 / 2
    return {
        "linear": 2 * hidden * ((layers - 1) * tokens * (kv + rest) + tokens * kv + scored * rest),
        "attention": per_pair
        * ((layers - 1) * (own + items * length * query) + scored * (query + length)),
        "head": 2 * hidden * shape["vocab_size"] * scored,
    }


def rates(shape: Mapping[str, int], dtype: torch.dtype, query: int) -> dict[str, float]:
    """Operations per second of torch's own routines at these shapes, nothing around them."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape["head_dim"]
    sizes = [
        (hidden, (heads + 2 * kv_heads) * dim),
        (heads * dim, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    ]
    x = [torch.randn(ROWS, a, dtype=dtype) for a, _ in sizes]
    w = [torch.randn(b, a, dtype=dtype) for a, b in sizes]
    group = heads // kv_heads
    q = torch.randn(1, kv_heads, group * ROWS, dim, dtype=dtype)
    k = torch.randn(1, kv_heads, query, dim, dtype=dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows, vocab = torch.randn(500, hidden), torch.randn(4096, hidden)
    return {
        "linear": 2
        * ROWS
        * sum(a * b for a, b in sizes)
        / _seconds(lambda: [functional.linear(*pair) for pair in zip(x, w, strict=True)]),
        "attention": 4 * heads * ROWS * query * dim / _seconds(lambda: flash(q, k, k)),
        "head": 2 * 500 * hidden * 4096 / _seconds(lambda: rows @ vocab.T),
    }


def _seconds(run: Callable[[], object], repeat: int = 7) -> float:
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
