"""Predicted times of a request on a model that ranks share (`--tensor-parallel`).

A rank waits for every sum before it computes on: nothing overlaps with an exchange, so times are
added. The host launches operator after operator, without CUDA graphs; a pass takes as long as the
device or the host, whichever takes longer. Before, rank 0 hands the batch to the other ranks.
Ranks that are not equally fast wait for each other, which the model does not know.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_work import Goal

from cost_model.forward import Shape, planned
from cost_model.judge import quantile
from cost_model.links import LARGE, Exchange, Link
from cost_model.model import LAUNCH_US
from cost_model.prediction import Forward, Kernel, Predictor
from cost_model.ranks import config_of, exchanges
from gpuscore.backends.common.estimate import plan_memory
from gpuscore.backends.torch.ranks.messages import words_of
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import PackedBatch

# Assumption: a collective runs on a stream of its own, and each change of streams takes a launch.
SWITCH_US = 2 * LAUNCH_US
# Host time of a layer without CUDA graphs, measured: 7.99 ms for the 28 layers of Qwen3-0.6B on one
# H200's machine ("graphs off", 300 tokens, bench/results/gpu-2026-11-23T070959Z.json).
HOST_LAYER_US = 7993 / 28
# Assumption: host time of a collective's call, as long as the least that one took without a graph
# (19 us, https://github.com/ByteDance-Seed/Triton-distributed/issues/57).
HOST_CALL_US = 19.0
# Assumption: a batch is packed, sent over a socket and unpacked in this time, and its words go to
# one rank after the other at this rate.
HANDED_US, HANDED_BYTES_PER_US = 100.0, 1000.0


@dataclass(frozen=True, slots=True)
class SharedForward:
    """Predicted times of one workload's batches on ranks, in microseconds.

    Args:
        ranks: that share the model.
        forward: what each rank computes.
        exchanges: by name, their time instead of that of kernels.
        sent: bytes of each rank's tensors in all exchanges together.
        host_us: of all launches and calls of a rank.
        handed_us: until the last rank has the batch.
    """

    ranks: int
    forward: Forward
    exchanges: tuple[Kernel, ...]
    sent: int
    host_us: float
    handed_us: float

    @property
    def exchange_us(self) -> float:
        return sum(one.us for one in self.exchanges)

    @property
    def waited_us(self) -> float:
        """Time in which the device waits for the host."""
        return max(0.0, self.host_us - self.forward.us - self.exchange_us)

    @property
    def us(self) -> float:
        return self.forward.us + self.exchange_us + self.waited_us + self.handed_us

    @property
    def low(self) -> float:
        """The sum of the lower ends, as if all errors had one sign; those of the host have none."""
        device = self.forward.low + sum(one.low for one in self.exchanges)
        return max(device, self.host_us) + self.handed_us

    @property
    def high(self) -> float:
        device = self.forward.high + sum(one.high for one in self.exchanges)
        return max(device, self.host_us) + self.handed_us

    def lost(self, alone: float) -> dict[str, float]:
        """Return where time goes beyond an equal part of what one card would take alone."""
        return {
            "exchange": self.exchange_us,
            "host": self.waited_us + self.handed_us,
            "unshared": self.forward.us - alone / self.ranks,
        }

    def to_json(self) -> dict[str, Any]:
        computed = self.forward.to_json()
        del computed["kernels"]
        return computed | {
            "ranks": self.ranks,
            "all ms": round(self.us / 1e3, 4),
            "interval ms": [round(self.low / 1e3, 4), round(self.high / 1e3, 4)],
            "exchange ms": round(self.exchange_us / 1e3, 4),
            "sent MB": round(self.sent / 1e6, 3),
            "host ms": round(self.host_us / 1e3, 4),
            "handed ms": round(self.handed_us / 1e3, 4),
            "exchanges": [
                {"exchange": one.name, "count": one.count, "ms": round(one.us / 1e3, 4)}
                for one in self.exchanges
            ],
        }


def on_ranks(
    predictor: Predictor, link: Link, known: Link, goal: Goal, shape: Shape, ranks: int
) -> SharedForward:
    """Predict a workload on ranks; one rank is the prediction for a card alone.

    Args:
        predictor: of one card.
        link: among the cards.
        known: the link whose error stands for those that nobody checked.
        goal: the workload.
        shape: of the model.
        ranks: that share it; a number that `link` knows.
    """
    forward = predictor.forward(goal, shape, ranks)
    if ranks == 1:
        return SharedForward(1, forward, (), 0, 0.0, 0.0)
    found: dict[str, Kernel] = {}
    sent, host, handed = 0, 0.0, 0.0
    for batch in planned(goal.workload, shape):
        for one in exchanges(batch, shape):
            kernel = _timed(one, link, known, ranks)
            before = found.get(one.name)
            found[one.name] = kernel if before is None else _sum(before, kernel)
            sent += one.count * one.bytes
            host += one.count * HOST_CALL_US
        host += shape["num_hidden_layers"] * HOST_LAYER_US
        handed += handing(batch, ranks)
    return SharedForward(ranks, forward, tuple(found.values()), sent, host, handed)


def handing(batch: PackedBatch, ranks: int) -> float:
    """Return the microseconds until the last rank has a batch: rank 0 sends it one by one."""
    return HANDED_US + (ranks - 1) * len(words_of(batch)) / HANDED_BYTES_PER_US


def _timed(one: Exchange, link: Link, known: Link, ranks: int) -> Kernel:
    us = link.us(one, ranks) + SWITCH_US
    large = one.bytes >= LARGE
    error = quantile(link.errors(large) or known.errors(large), 0.9)
    times = us, us / (1 + error), us / (1 - error)
    return Kernel(one.name, one.count, *(one.count * time for time in times), "link")


def _sum(one: Kernel, other: Kernel) -> Kernel:
    times = one.us + other.us, one.low + other.low, one.high + other.high
    return Kernel(one.name, one.count + other.count, *times, "link")


def why_not(shape: Shape, ranks: int, memory_mib: int) -> str | None:
    """Say why gpuscore would refuse the model on cards with so much memory; None if it fits."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(shape)))
        config = ModelConfig(folder, tensor_parallel=ranks)
        plan = plan_memory(Path(folder), config, memory_mib << 20)
    try:
        plan.check()
    except ConfigError as error:
        return str(error)
    return None
