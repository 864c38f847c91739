"""Calibration of a `Model`: the parameters with which it comes closest to measurements.

Closest is the smallest sum of |log(predicted / measured)|, so a measurement that is twice as fast
counts as much as one that is twice as slow, and outliers count little. Parameters are searched from
the best point of a fixed grid, one after the other, in steps that shrink: the same measurements
always give the same model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import TypeAlias

from cost_model.cycles import Overlap
from cost_model.model import LAUNCH_US, Cards, Model
from cost_model.products import product_cycles
from cost_model.published import Measurement, Product

Bounds: TypeAlias = Sequence[tuple[float, float]]
Point: TypeAlias = tuple[float, ...]

# Search ranges.
OVERHEAD = (0.0, 8000.0)
MEMORY = (0.3, 1.0)
OVERLAP: Bounds = ((0.3, 1.0), (0.0, 1.0), (0.0, 1500.0), (0.0, 12000.0))
GRID = (1 / 6, 3 / 6, 5 / 6)  # of each range, for the start
SHRINKS = 8  # halvings of a step, which begins with an eighth of the range


def calibrate(measurements: Sequence[Measurement], cards: Cards) -> Model:
    """Fit all parameters.

    Raises:
        ValueError: there is no product of a card on which something else was measured.
    """
    model = fit_products(measurements, cards)
    missing = {cards[one.card].measured_as for one in measurements} - model.speed.keys()
    if missing:
        raise ValueError(f"no products were measured on {', '.join(sorted(missing))}")
    model = fit_memory(model, measurements, cards)
    for kind in sorted({cards[one.card].tensor_cores for one in measurements}):
        model = fit_overlap(model, kind, measurements, cards)
    return model


def fit_products(measurements: Sequence[Measurement], cards: Cards) -> Model:
    """Fit the overhead of tiles and every card's speed; other parameters are not set yet.

    For each overhead, a card's speed is the median of what its products show.
    """
    chosen = [one for one in measurements if one.kind == "product"]

    def at(overhead: float) -> Model:
        shown: dict[str, list[float]] = {}
        for one in chosen:
            assert isinstance(one.work, Product)
            card = cards[one.card]
            boosted = product_cycles(one.work, card, overhead) / (1e3 * card.clock_ghz)
            shown.setdefault(one.card, []).append(boosted / (one.us - LAUNCH_US))
        return Model({key: median(some) for key, some in shown.items()}, overhead, 1.0, {})

    best = minimise(lambda point: loss(at(point[0]), chosen, cards), [OVERHEAD])
    return at(best[0])


def fit_memory(model: Model, measurements: Sequence[Measurement], cards: Cards) -> Model:
    """Fit the share of the memory's bandwidth."""
    chosen = [one for one in measurements if one.kind == "rowwise"]
    best = minimise(lambda point: loss(replace(model, memory=point[0]), chosen, cards), [MEMORY])
    return replace(model, memory=best[0])


def fit_overlap(
    model: Model, kind: str, measurements: Sequence[Measurement], cards: Cards
) -> Model:
    """Fit the overlap of one kind of tensor core; unchanged without attention on such cards."""
    chosen = [
        one
        for one in measurements
        if one.kind == "attention" and cards[one.card].tensor_cores == kind
    ]

    def at(point: Point) -> Model:
        return replace(model, overlap={**model.overlap, kind: Overlap(*point)})

    if not chosen:
        return model
    return at(minimise(lambda point: loss(at(point), chosen, cards), OVERLAP))


def loss(model: Model, measurements: Sequence[Measurement], cards: Cards) -> float:
    """Sum of |log(predicted / measured)|."""
    return sum(
        abs(math.log(model.predict(one.work, cards[one.card]) / one.us)) for one in measurements
    )


def minimise(function: Callable[[Point], float], bounds: Bounds) -> Point:
    """Return a point within `bounds` at which no step along one axis gives less."""
    grid = product(*([low + part * (high - low) for part in GRID] for low, high in bounds))
    least, point = min((function(point), point) for point in grid)
    for shrink in range(SHRINKS):
        moved = True
        while moved:
            moved = False
            for axis, (low, high) in enumerate(bounds):
                step = (high - low) / 8 / 2**shrink
                for value in (point[axis] - step, point[axis] + step):
                    near = (*point[:axis], min(max(value, low), high), *point[axis + 1 :])
                    if (found := function(near)) < least:
                        point, least, moved = near, found, True
    return point
