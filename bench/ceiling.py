"""The least time that a workload can take: counted operations over rates measured in the same run.

The operations are a packed forward pass without decoding: every linear layer for all
tokens, except that the last layer computes queries, output projection and MLP for one row per item
only; attention of every row over the keys it sees; the LM head for one row per item. The experts
that a row of a mixture chooses count as one MLP as wide as all of them, so that their division
into products of a few rows each is not part of the floor.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from clock import median_seconds
from torch import Tensor
from torch.nn import functional

ROWS = 2048  # rows of the measured products
WEIGHT_BYTES = 1 << 27  # of the weights on which a product's calls take turns


def operations(
    shape: Mapping[str, int], query: int, items: int, length: int, cached: int = 0
) -> dict[str, float]:
    """Count multiplications and additions of each kind; the kinds are the keys of `rates`.

    Args:
        shape: the model's configuration.
        query: tokens of the query.
        items: number of items.
        length: tokens of an item.
        cached: tokens of the query that are cached.
    """
    hidden, inner = shape["hidden_size"], _inner(shape)
    layers, dim = shape["num_hidden_layers"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    tokens, scored = query - cached + items * length, items
    kv, rest = 2 * kv_heads * dim, 2 * heads * dim + 3 * inner + shape.get("num_experts", 0)
    per_pair = 4 * heads * dim
    if "linear_num_key_heads" in shape:
        return _hybrid_operations(shape, tokens, scored, query, length, cached)
    own = (query**2 - cached**2) / 2 + items * length**2 / 2
    return {
        "linear": 2 * hidden * ((layers - 1) * tokens * (kv + rest) + tokens * kv + scored * rest),
        "attention": per_pair
        * ((layers - 1) * (own + items * length * query) + scored * (query + length)),
        "head": 2 * hidden * shape["vocab_size"] * scored,
    }


def _hybrid_operations(
    shape: Mapping[str, int], tokens: int, scored: int, query: int, length: int, cached: int
) -> dict[str, float]:
    """Count for a model with linear layers, which reads and writes a state at every row: per head
    two products with it, and one sum of products into it, as the recurrence has them. Their gates
    and convolutions are not counted. Queries of attention have a gate each."""
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    full = layers // shape["full_attention_interval"]
    heads, kv_heads, dim = (
        shape["num_attention_heads"],
        shape["num_key_value_heads"],
        shape["head_dim"],
    )
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
    mlp, kv = 3 * shape["intermediate_size"], 2 * kv_heads * dim
    rest = 3 * heads * dim + mlp
    of_linear = 2 * keys + 3 * values + 2 * shape["linear_num_value_heads"] + mlp
    own = (query**2 - cached**2) / 2 + scored * length**2 / 2
    return {
        "linear": 2 * hidden * ((full - 1) * tokens * (kv + rest) + tokens * kv + scored * rest)
        + 2 * hidden * (layers - full) * tokens * of_linear,
        "attention": 4
        * heads
        * dim
        * ((full - 1) * (own + scored * length * query) + scored * (query + length)),
        "head": 2 * hidden * shape["vocab_size"] * scored,
        "state": 6 * (layers - full) * tokens * shape["linear_key_head_dim"] * values,
    }


def linear_sizes(shape: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(columns in, columns out) of the products of one layer, without a mixture's router."""
    hidden, inner = shape["hidden_size"], _inner(shape)
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape["head_dim"]
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * dim),
        "o": (heads * dim, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


def _inner(shape: Mapping[str, int]) -> int:
    """Width between an MLP's products; for a mixture, the sum over all experts of a row."""
    if "num_experts" in shape:
        return shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
    return shape["intermediate_size"]


def rates(
    shape: Mapping[str, int], dtype: torch.dtype, query: int, precision: str = "full"
) -> dict[str, float]:
    """Measure operations per second of torch's own routines at these shapes on a CPU.

    Args:
        shape: the model's configuration.
        dtype: of the model.
        query: tokens that every row of attention sees.
        precision: of linear layers: "full", or "int8" with float32 results. Rows are quantised
            before the clock starts, so that no way to quantise them is part of the floor.
    """
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = linear_sizes(shape).values()
    product = _int8_product if precision == "int8" else _dense_product
    products = [product(a, b, dtype) for a, b in sizes]
    group = heads // kv_heads
    q = torch.randn(1, kv_heads, group * ROWS, dim, dtype=dtype)
    k = torch.randn(1, kv_heads, query, dim, dtype=dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows, vocab = torch.randn(500, hidden), torch.randn(4096, hidden)
    of_states: dict[str, float] = {}
    if "linear_num_key_heads" in shape:  # rows times the matrix of each head, in float32
        size = shape["linear_value_head_dim"]
        x = torch.randn(shape["linear_num_value_heads"], ROWS, shape["linear_key_head_dim"])
        states = torch.randn(len(x), x.shape[2], size)
        of_states["state"] = 2 * x.numel() * size / _cpu_seconds(lambda: x @ states)
    return of_states | {
        "linear": 2
        * ROWS
        * sum(a * b for a, b in sizes)
        / _cpu_seconds(lambda: [run() for run in products]),
        "attention": 4 * heads * ROWS * query * dim / _cpu_seconds(lambda: flash(q, k, k)),
        "head": 2 * 500 * hidden * 4096 / _cpu_seconds(lambda: rows @ vocab.T),
    }


def _dense_product(columns: int, outputs: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a product of `ROWS` random rows of `columns` numbers, in bfloat16 with a weight in the
    order in which oneDNN reads it, if it can."""
    x, w = torch.randn(ROWS, columns, dtype=dtype), torch.randn(outputs, columns, dtype=dtype)
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return partial(functional.linear, x, w)
    reordered = torch.ops.mkldnn._reorder_linear_weight(w)
    return partial(torch.ops.mkldnn._linear_pointwise, x, reordered, None, "none", [], "")


def _int8_product(columns: int, outputs: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return the product in INT8 by oneDNN, with unsigned rows, packed weights and their scales."""
    q = torch.randint(256, (ROWS, columns), dtype=torch.uint8)
    w = torch.randint(-127, 128, (outputs, columns), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(w, None)
    scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int32)
    of_result = None, 1.0, 0, torch.float32, "none", [], ""
    return partial(
        torch.ops.onednn.qlinear_pointwise, q, 1.0, 128, packed, scales, zeros, *of_result
    )


def _cpu_seconds(run: Callable[[], object]) -> float:
    return median_seconds(run, torch.device("cpu"), repeat=7, warm=1)


def copy_rate(device: torch.device, size: int = 1 << 30) -> float:
    """Measure bytes per second, read plus written, of copying `size` bytes."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def product_seconds(
    rows: int,
    inner: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    weight_bytes: int = WEIGHT_BYTES,
) -> float:
    """Measure the seconds of one product [rows, inner] x [inner, columns] of random numbers.

    Calls take turns on up to 16 weights, about `weight_bytes` in all, so that no weight is still in
    a cache when it is used again.
    """
    size = inner * columns * dtype.itemsize
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weights = [
        torch.randn(columns, inner, device=device, dtype=dtype)
        for _ in range(max(1, min(16, weight_bytes // size)))
    ]

    def run() -> None:
        for weight in weights:
            functional.linear(x, weight)

    return median_seconds(run, device) / len(weights)


def weight_bytes(shape: Mapping[str, int], dtype: torch.dtype) -> int:
    """Bytes of the layers and the head, which every batch reads at least once."""
    per_layer = sum(a * b for a, b in linear_sizes(shape).values())
    head = shape["vocab_size"] * shape["hidden_size"]
    return (shape["num_hidden_layers"] * per_layer + head) * dtype.itemsize
