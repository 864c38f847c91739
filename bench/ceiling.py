"""The least time that a workload can take: counted operations over rates measured in the same run.

The operations are a packed forward pass without decoding: every linear layer for all
tokens, except that the last layer computes queries, output projection and MLP for one row per item
only; attention of every row over the keys it sees; the LM head for one row per item.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from clock import median_seconds
from scenarios import Workload
from torch import Tensor
from torch.nn import functional

ROWS = 2048  # rows of the products measured on a CPU


def operations(
    shape: Mapping[str, int], query: int, items: int, length: int, cached: int = 0
) -> dict[str, float]:
    """Count multiplications and additions of each kind.

    A linear layer reads and writes a state at every row: per head two products with it, and one sum
    of products into it, as the recurrence has them. Its gates and convolutions are not counted.
    Queries of attention have a gate each in such a model.

    Args:
        shape: the model's configuration.
        query: tokens of the query.
        items: number of items.
        length: tokens of an item.
        cached: tokens of the query that are cached.
    """
    hidden, dim, mlp = shape["hidden_size"], shape["head_dim"], 3 * shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    full = shape["num_hidden_layers"] // shape.get("full_attention_interval", 1)
    linear = shape["num_hidden_layers"] - full
    tokens = query - cached + items * length
    kv, rest = 2 * kv_heads * dim, (3 if linear else 2) * heads * dim + mlp
    inside = (query**2 - cached**2) / 2 + items * length**2 / 2
    pairs = (full - 1) * (inside + items * length * query) + items * (query + length)
    numbers = (full - 1) * tokens * (kv + rest) + tokens * kv + items * rest
    counted = {"attention": 4.0 * heads * dim * pairs}
    if linear:
        keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
        values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
        gates = 2 * shape["linear_num_value_heads"]
        numbers += linear * tokens * (2 * keys + 3 * values + gates + mlp)
        counted["state"] = 6.0 * linear * tokens * shape["linear_key_head_dim"] * values
    head = 2.0 * hidden * shape["vocab_size"] * items
    return counted | {"linear": 2.0 * hidden * numbers, "head": head}


def linear_sizes(shape: Mapping[str, int]) -> list[tuple[int, int]]:
    """(columns in, columns out) of the products of one layer: QKV, o, gate and up, down."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape["head_dim"]
    qkv, o = (hidden, (heads + 2 * kv_heads) * dim), (heads * dim, hidden)
    return [qkv, o, (hidden, 2 * inner), (inner, hidden)]


# ---- a CPU ----


def cpu_floor(shape: Mapping[str, Any], dtype: torch.dtype, workload: Workload) -> dict[str, float]:
    """Return the seconds of the counted operations at rates measured now, and those rates."""
    counted = operations(shape, workload.query_len, workload.num_items, workload.item_len)
    measured = cpu_rates(shape, dtype, workload.query_len)
    shown = {f"{kind} TFLOP/s": round(rate / 1e12, 3) for kind, rate in measured.items()}
    return shown | {"seconds": workload.requests * sum(counted[k] / measured[k] for k in counted)}


def cpu_rates(shape: Mapping[str, int], dtype: torch.dtype, query: int) -> dict[str, float]:
    """Measure operations per second of torch's own routines at these shapes, over `query` keys."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = linear_sizes(shape)
    products = [_product(a, b, dtype) for a, b in sizes]
    q = torch.randn(1, kv_heads, heads // kv_heads * ROWS, dim, dtype=dtype)
    k = torch.randn(1, kv_heads, query, dim, dtype=dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows, vocab = torch.randn(500, hidden), torch.randn(4096, hidden)
    linear = median_seconds(lambda: [run() for run in products])
    return {
        "linear": 2 * ROWS * sum(a * b for a, b in sizes) / linear,
        "attention": 4 * heads * ROWS * query * dim / median_seconds(lambda: flash(q, k, k)),
        "head": 2 * 500 * hidden * 4096 / median_seconds(lambda: rows @ vocab.T),
    }


def _product(columns: int, outputs: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a product of `ROWS` random rows of `columns` numbers, in bfloat16 with a weight in the
    order in which oneDNN reads it, if it can."""
    x, w = torch.randn(ROWS, columns, dtype=dtype), torch.randn(outputs, columns, dtype=dtype)
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return partial(functional.linear, x, w)
    reordered = torch.ops.mkldnn._reorder_linear_weight(w)
    return partial(torch.ops.mkldnn._linear_pointwise, x, reordered, None, "none", [], "")


# ---- a card ----


def card_rates(
    dtype: torch.dtype, device: torch.device, size: int, copied: int
) -> dict[str, float]:
    """Measure the rate of a product of this size (FLOP/s) and of a copy of so many bytes (bytes/s,
    read plus written)."""
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device)
    x, w = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = median_seconds(lambda: functional.linear(x, w), device)
    return {"product": 2 * size**3 / seconds, "copy": 2 * copied / copy}


def card_floor(
    shape: Mapping[str, Any], load: Workload, dtype: torch.dtype, measured: Mapping[str, float]
) -> float:
    """Return the least time of a workload in milliseconds.

    All counted operations at the rate of the large product, or one read of the weights at the rate
    of a copy, whichever takes longer.
    """
    counted = operations(shape, load.query_len, load.num_items, load.item_len, load.cached)
    layer = sum(a * b for a, b in linear_sizes(shape))
    weights = shape["num_hidden_layers"] * layer + shape["vocab_size"] * shape["hidden_size"]
    reading = weights * dtype.itemsize / measured["copy"]
    return 1e3 * max(sum(counted.values()) / measured["product"], reading)
