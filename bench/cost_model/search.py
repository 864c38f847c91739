"""Searches the configurations of `extend_attention`, where the model's error permits a choice."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from cost_model.cards import Card
from cost_model.judge import Errors, may_choose
from gpuscore_kernels.extend_attention import TileConfig
from kernel_code.facts import CodeFacts


def candidates(shipped: TileConfig) -> Iterator[TileConfig]:
    """Yield the shipped configuration, then others of the same kind."""
    yield shipped
    for rows, keys, warps, stages in product((64, 128), (32, 64), (4, 8), (2, 3, 4)):
        other = TileConfig(rows, keys, min(32, keys), warps, stages, carry_slot=shipped.carry_slot)
        if other != shipped:
            yield other


def choose(
    configs: Sequence[TileConfig],
    facts: Callable[[TileConfig], CodeFacts],
    predict: Callable[[TileConfig, CodeFacts], float],
    errors: Errors,
    card: Card,
) -> list[tuple[float, TileConfig]]:
    """Return predicted times and configurations, the fastest first, which is the choice.

    Nothing is compiled if the model may not choose. Configurations that use the stack, or of which
    no block fits, are left out.

    Raises:
        Refused: the model's error does not permit a choice.
    """
    may_choose(errors, card)
    found = []
    for config in configs:
        code = facts(config)
        if code.stack == 0 and code.resident > 0:
            found.append((predict(config, code), config))
    return sorted(found, key=lambda pair: pair[0])
