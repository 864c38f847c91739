"""Sums of the metrics of several processes that are one server."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Labels: TypeAlias = tuple[tuple[str, str], ...]
Key: TypeAlias = tuple[str, str, Labels]  # names of the family and of the sample, labels
Samples: TypeAlias = dict[Key, float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of one process, or the sum of several, at one time."""

    growing: Samples = field(default_factory=dict)  # of counters and histograms
    present: Samples = field(default_factory=dict)  # of gauges, which end with their process


def take_snapshot(families: Iterable[Metric]) -> Snapshot:
    snapshot = Snapshot()
    for family in families:
        samples = snapshot.present if family.type == "gauge" else snapshot.growing
        for sample in family.samples:
            samples[_key(family, sample)] = sample.value
    return snapshot


def add(sums: Samples, more: Samples) -> None:
    """Add samples to `sums`."""
    for key, value in more.items():
        sums[key] = _sum(key[1], sums[key], value) if key in sums else value


class SummedCollector(Collector):
    """The metrics of this process plus other processes' metrics.

    Args:
        own: the metrics of this process.
        others: gets what this process shows and returns the summed samples of the other processes;
            called once for each scrape. If this process ends, the counts that it has shown must not
            be lost.
    """

    def __init__(self, own: Collector, others: Callable[[Snapshot], Samples]) -> None:
        self._own, self._others = own, others

    def collect(self) -> Iterator[Metric]:
        own = list(self._own.collect())
        by_family: dict[str, Samples] = {}
        for key, value in self._others(take_snapshot(own)).items():
            by_family.setdefault(key[0], {})[key] = value
        for family in own:
            yield _with(family, by_family.get(family.name, {}))


def _with(family: Metric, others: Samples) -> Metric:
    """Return a family plus the others' samples of it, those with labels unknown here included."""
    own = {_key(family, sample): sample for sample in family.samples}
    whole = copy(family)
    whole.samples = [
        sample._replace(value=_sum(sample.name, sample.value, others[key]))
        if key in others
        else sample
        for key, sample in own.items()
    ]
    new = ((key, value) for key, value in others.items() if key not in own)
    whole.samples += [Sample(name, dict(labels), value) for (_, name, labels), value in new]
    return whole


def _key(family: Metric, sample: Sample) -> Key:
    return family.name, sample.name, tuple(sample.labels.items())


def _sum(name: str, value: float, other: float) -> float:
    # A metric was created when the first process created it.
    return min(value, other) if name.endswith("_created") else value + other
