"""The card's rates, measured in this run, and from them the least time of each workload."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ceiling import copy_rate, operations, product_seconds, product_table, weight_bytes
from gpu_work import Goal


def measure(
    shape: Mapping[str, int],
    goals: Sequence[Goal],
    dtype: torch.dtype,
    device: torch.device,
    quick: bool,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Measure the ceilings; return them and the floors of each workload."""
    size, copied, repeat = (256, 1 << 22, 2) if quick else (8192, 1 << 30, 10)
    rate = 2 * size**3 / product_seconds(size, size, size, dtype, device)
    copy = copy_rate(device, copied)
    ceilings = {
        "copy GB/s": round(copy / 1e9, 1),
        f"{size}^3 TFLOP/s": round(rate / 1e12, 3),
        "dtype": str(dtype).removeprefix("torch."),
    }
    weights = weight_bytes(shape, dtype)
    return ceilings, {
        goal.name: _floor(shape, goal, dtype, device, rate, weights / copy, repeat)
        for goal in goals
    }


def _floor(
    shape: Mapping[str, int],
    goal: Goal,
    dtype: torch.dtype,
    device: torch.device,
    rate: float,
    read_weights: float,
    repeat: int,
) -> dict[str, Any]:
    """Return the floors of one workload, in milliseconds.

    `ms` is the floor that goals are compared with: all counted operations at the rate of the large
    product, or the time to read the weights once, whichever is longer. For `at shapes ms`, products
    take the time of torch's own products at this workload's shapes, and attention has the rate of
    the large product.
    """
    work = goal.workload
    counted = operations(shape, work.query_len, work.num_items, work.item_len, work.cached)
    products = product_table(shape, work.tokens, work.num_items, dtype, device, repeat)
    linear = sum(seconds for name, seconds in products.items() if name != "head")
    at_shapes = sum(products.values()) + counted["attention"] / rate
    return {
        "sizes": str(work),
        "tokens": work.tokens,
        "TFLOP": sum(counted.values()) / 1e12,
        "ms": 1e3 * max(sum(counted.values()) / rate, read_weights),
        "at shapes ms": 1e3 * max(at_shapes, read_weights),
        "weights ms": 1e3 * read_weights,
        "linear TFLOP/s": counted["linear"] / linear / 1e12,
        "items/s": work.num_items / max(sum(counted.values()) / rate, read_weights),
        "products ms": {name: 1e3 * seconds for name, seconds in products.items()},
    }
