"""Errors of a model on measurements that it has not seen, and what they permit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cost_model.cards import Card
from cost_model.fit import calibrate, fit_memory, fit_overlap, fit_products
from cost_model.model import Cards, Model
from cost_model.published import Measurement, halves

LIMIT = 0.2  # the largest error with which a model may choose
LEAST = 5  # measurements on the same tensor cores without which it may not either

Interval: TypeAlias = tuple[float, float]
Group: TypeAlias = str  # "product", "rowwise", "attention wgmma", "attention mma.sync"


class Refused(Exception):
    """The model may not choose."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors, |predicted / measured - 1|, of one group of kernels.

    Args:
        group: of kernels that share parameters.
        count: measurements.
        median, ninetieth: of the held-out half.
        transfer: the 90th percentile if each series is predicted by a model that has seen none of
            it, so that the kernel and its author are new to the model; NaN where it cannot be had,
            because a card's speed is in one series only.
        places: number of measurements by arch and operations per cycle of the cards.
    """

    group: Group
    count: int
    median: float
    ninetieth: float
    transfer: float
    places: Mapping[tuple[int, int], int]

    @property
    def worst(self) -> float:
        """The larger of both errors."""
        return self.ninetieth if math.isnan(self.transfer) else max(self.ninetieth, self.transfer)

    def knows(self, card: Card) -> int:
        """Return the number of held-out measurements on tensor cores like those of a card."""
        return self.places.get((card.arch, card.flop_per_cycle), 0)


def interval(us: float, errors: Mapping[Group, Errors], group: Group, card: Card) -> Interval:
    """Return the times within which a prediction's measurement is, in nine of ten cases.

    On tensor cores that the group's held-out measurements did not have, the error is taken to be
    the largest of all groups of that kind of kernel.
    """
    worst = errors[group].worst
    if not errors[group].knows(card):
        kind = group.split()[0]
        worst = max(one.worst for name, one in errors.items() if name.split()[0] == kind)
    return us / (1 + worst), us / (1 - worst) if worst < 1 else math.inf


def group_of(one: Measurement, cards: Cards) -> Group:
    """Return the group whose parameters predict a measurement."""
    if one.kind == "attention":
        return f"attention {cards[one.card].tensor_cores}"
    return one.kind


def relative(model: Model, one: Measurement, cards: Cards) -> float:
    return abs(model.predict(one.work, cards[one.card]) / one.us - 1)


def judge(measurements: Sequence[Measurement], cards: Cards) -> tuple[Model, dict[Group, Errors]]:
    """Calibrate with one half, and measure the errors on the other.

    Returns:
        The model that has seen the first half only, and its errors by group.
    """
    calibration, held_out = halves(measurements)
    model = calibrate(calibration, cards)
    found: dict[Group, Errors] = {}
    for group in sorted({group_of(one, cards) for one in held_out}):
        chosen = [one for one in held_out if group_of(one, cards) == group]
        errors = [relative(model, one, cards) for one in chosen]
        places: dict[tuple[int, int], int] = {}
        for one in chosen:
            place = cards[one.card].arch, cards[one.card].flop_per_cycle
            places[place] = places.get(place, 0) + 1
        found[group] = Errors(
            group=group,
            count=len(chosen),
            median=quantile(errors, 0.5),
            ninetieth=quantile(errors, 0.9),
            transfer=_transfer(group, measurements, cards),
            places=places,
        )
    return model, found


def _transfer(group: Group, measurements: Sequence[Measurement], cards: Cards) -> float:
    """Return the 90th percentile of errors on series that the calibration has not seen."""
    chosen = [one for one in measurements if group_of(one, cards) == group]
    kernels = sorted({one.series for one in chosen})
    if group == "product" or len(kernels) < 2:
        return math.nan
    model = fit_products(measurements, cards)
    errors = []
    for series in kernels:
        others = [one for one in chosen if one.series != series]
        if group == "rowwise":
            fitted = fit_memory(model, others, cards)
        else:
            fitted = fit_overlap(model, group.removeprefix("attention "), others, cards)
        errors += [relative(fitted, one, cards) for one in chosen if one.series == series]
    return quantile(errors, 0.9)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def may_choose(errors: Errors, card: Card) -> None:
    """Return if a model with these errors may choose for a card.

    Raises:
        Refused: with the reason and its numbers.
    """
    if not errors.worst <= LIMIT:
        raise Refused(
            f"{errors.group}: the error is {errors.worst:.0%} (90th percentile), over {LIMIT:.0%}"
        )
    if (known := errors.knows(card)) < LEAST:
        raise Refused(
            f"{errors.group}: {known} held-out measurements on tensor cores of sm_{card.arch} with "
            f"{card.flop_per_cycle} operations per cycle; at least {LEAST} are needed"
        )
