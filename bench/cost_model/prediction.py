"""Predicted times of a forward pass, kernel by kernel, each with its interval."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from ceiling import operations, weight_bytes
from gpu_work import Goal

from cost_model.cards import Card
from cost_model.forward import Launch, Shape, launches, planned
from cost_model.judge import Errors, interval
from cost_model.model import LAUNCH_US, Model
from cost_model.ours import Code, bound, table_cycles
from cost_model.published import SHORTEST_US, Product, Rowwise
from cost_model.ranks import more_rowwise, part_of
from gpuscore_kernels.extend_attention import TileShape, TileTable

LARGE = 8192  # rows, columns and inner size of the product that floors are compared with


@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernels of one name: how often, microseconds of all of them together, and what bounds them.

    Args:
        name: of the kernel.
        count: launches.
        us: predicted time of all.
        low, high: between these the measured time is expected.
        bound: the part of the card that is busiest.
    """

    name: str
    count: int
    us: float
    low: float
    high: float
    bound: str


@dataclass(frozen=True, slots=True)
class Forward:
    """Predicted times of one workload's batches on one card, in microseconds.

    Args:
        card: its key.
        workload: name of the goal.
        kernels: in the order of their first launch.
        floor_us: the least time of `bench/ceiling.py`, at the predicted rate of a large product.
        attention_flop: counted operations of attention.
    """

    card: str
    workload: str
    kernels: tuple[Kernel, ...]
    floor_us: float
    attention_flop: float

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels)

    @property
    def low(self) -> float:
        """The sum of the kernels' lower ends, as if all errors had one sign."""
        return sum(kernel.low for kernel in self.kernels)

    @property
    def high(self) -> float:
        return sum(kernel.high for kernel in self.kernels)

    @property
    def short(self) -> float:
        """Share of the time in kernels that are shorter than any measurement of the model's."""
        brief = [one.us for one in self.kernels if one.us / one.count < SHORTEST_US]
        return sum(brief) / self.us

    def attention_us(self) -> tuple[float, float, float]:
        """Time of attention in all layers, and the ends of its interval."""
        chosen = [one for one in self.kernels if one.name.startswith("attention")]
        return (
            sum(one.us for one in chosen),
            sum(one.low for one in chosen),
            sum(one.high for one in chosen),
        )

    def attention_rates(self) -> tuple[float, float, float]:
        """TFLOP/s of attention, and the ends of its interval."""
        us, low, high = (self.attention_flop / time / 1e6 for time in self.attention_us())
        return us, high, low

    def to_json(self) -> dict[str, Any]:
        rates = dict(zip(("predicted", "low", "high"), self.attention_rates(), strict=True))
        return {
            "card": self.card,
            "workload": self.workload,
            "predicted ms": round(self.us / 1e3, 4),
            "low ms": round(self.low / 1e3, 4),
            "high ms": round(self.high / 1e3, 4),
            "floor ms": round(self.floor_us / 1e3, 4),
            "share of floor": round(self.floor_us / self.us, 3),
            "share in short kernels": round(self.short, 3),
            "attention TFLOP/s": {end: round(rate, 1) for end, rate in rates.items()},
            "kernels": [
                {
                    "kernel": one.name,
                    "count": one.count,
                    "predicted ms": round(one.us / 1e3, 4),
                    "low ms": round(one.low / 1e3, 4),
                    "high ms": round(one.high / 1e3, 4),
                    "bound": one.bound,
                }
                for one in self.kernels
            ],
        }


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts forward passes of one model's shape on one card.

    Args:
        model, errors: of the cost model.
        card: to predict for.
        code, tile: of the attention kernel.
    """

    model: Model
    errors: Mapping[str, Errors]
    card: Card
    code: Code
    tile: TileShape

    def forward(self, goal: Goal, shape: Shape, ranks: int = 1) -> Forward:
        """Predict what one card computes, which with several ranks is its part of every batch."""
        work, own = goal.workload, part_of(shape, ranks)
        found: dict[str, Kernel] = {}
        for batch in planned(work, shape):
            kernels = launches(batch, own, self.tile, graphs=ranks == 1)
            more = more_rowwise(batch, shape) if ranks > 1 else ()
            for one in chain(kernels, (Launch(*kernel) for kernel in more)):
                us, group, name = self.kernel(one.work, own)
                times = us, *interval(us, self.errors, group, self.card)
                kernel = Kernel(one.name, one.count, *(one.count * time for time in times), name)
                found[one.name] = _added(found.get(one.name), kernel)
        counted = operations(own, work.query_len, work.num_items, work.item_len, work.cached)
        return Forward(
            self.card.key,
            goal.name,
            tuple(found.values()),
            self.floor_us(sum(counted.values()), own),
            counted["attention"],
        )

    def kernel(self, work: Product | Rowwise | TileTable, shape: Shape) -> tuple[float, str, str]:
        """Return microseconds, the group whose error they have, and what bounds the kernel."""
        if isinstance(work, TileTable):
            overlap = self.model.overlap[self.card.tensor_cores]
            heads = shape["num_key_value_heads"]
            cycles = table_cycles(work, self.code, heads, self.card, overlap)
            name = bound(work, self.code, self.card, overlap)
            us = self.model.microseconds(cycles, self.card)
            group = f"attention {self.card.tensor_cores}"
        else:
            us = self.model.predict(work, self.card)
            group = "product" if isinstance(work, Product) else "rowwise"
            memory = us <= self.model.memory_us(work.bytes, self.card)
            name = "memory" if memory else "tensor"
        return us, group, "launch" if us < 2 * LAUNCH_US else name

    def floor_us(self, flop: float, shape: Shape) -> float:
        """Return the least time: operations at the rate of a large product, or reading weights."""
        large = Product(LARGE, LARGE, LARGE)
        product = flop / large.flop * self.model.predict(large, self.card)
        read = self.model.memory_us(weight_bytes(shape, torch.bfloat16), self.card)
        return max(product, read)


def _added(one: Kernel | None, other: Kernel) -> Kernel:
    """Return the sum of two kernels of one name; its bound is that of the longer one."""
    if one is None:
        return other
    return Kernel(
        one.name,
        one.count + other.count,
        one.us + other.us,
        one.low + other.low,
        one.high + other.high,
        one.bound if one.us >= other.us else other.bound,
    )
