"""The card's rates, measured in this run, and from them the least time of each workload."""

from collections.abc import Mapping
from typing import Any

import torch
from ceiling import copy_rate, operations, product_seconds, weight_bytes
from scenarios import Workload


def rates(dtype: torch.dtype, device: torch.device, trial: bool) -> dict[str, float]:
    """Measure the rate of a large product (FLOP/s) and of a copy (bytes/s, read plus written)."""
    size, copied = (256, 1 << 22) if trial else (8192, 1 << 30)
    seconds = product_seconds(size, size, size, dtype, device)
    return {"product": 2 * size**3 / seconds, "copy": copy_rate(device, copied)}


def floor(
    shape: Mapping[str, Any], work: Workload, dtype: torch.dtype, measured: Mapping[str, float]
) -> dict[str, Any]:
    """Return the least time of a workload in milliseconds, and what it follows from.

    All counted operations at the rate of the large product, or one read of the weights at the rate
    of a copy, whichever takes longer.
    """
    counted = operations(shape, work.query_len, work.num_items, work.item_len, work.cached)
    computing = sum(counted.values()) / measured["product"]
    seconds = max(computing, weight_bytes(shape, dtype) / measured["copy"])
    return {
        "sizes": str(work),
        "tokens": work.tokens,
        "TFLOP": sum(counted.values()) / 1e12,
        "ms": 1e3 * seconds,
        "items/s": work.num_items / seconds,
    }
