"""Figures of measurements: rates, times and latencies, each with its interval over the repeats."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from gpuscore.measure.bench.load import LOST, Record
from gpuscore.measure.intervals import FEWEST, Interval, Resamples
from gpuscore.measure.sensors import Reading, limits, said
from gpuscore.types.batch import Float64Array

REFUSED = 429
# Of sending, at the 99th percentile: the client's fault where it is as much of the median latency.
LATE_MS, LATE_SHARE = 5.0, 0.1
BUSY = 0.85  # share of a core that the client's one thread took: the client was the limit
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Shot:
    """One measurement of a way.

    Attributes:
        seconds: from the first arrival to the last answer.
        items, requests: that were answered.
        latencies: [requests] in milliseconds, of the requests that were answered.
        refused: requests that got 429.
        late: 99th percentile of the time by which requests were sent late, in milliseconds.
        busy: share of a core that the client took.
        gpu: what the sensors of this machine's GPU said meanwhile; empty if it was not asked.
    """

    seconds: float
    items: int
    requests: int
    latencies: Float64Array
    refused: int
    late: float
    busy: float
    gpu: Reading = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record, items: Sequence[int], gpu: Reading | None = None) -> "Shot":
        """Read a record of requests with these numbers of items."""
        good = record.status == 200
        late = (record.sent - record.due)[~np.isnan(record.sent)]
        return cls(
            record.seconds,
            int(np.asarray(items)[good].sum()),
            int(good.sum()),
            record.latency[good] * 1e3,
            int((record.status == REFUSED).sum()),
            float(np.percentile(late, 99)) * 1e3 if late.size else 0.0,
            record.client_seconds / max(record.seconds, 1e-9),
            gpu or {},
        )

    @property
    def rate(self) -> float:
        """Items per second."""
        return self.items / self.seconds

    def extrapolated(self, first: int, total: int) -> "Shot":
        """Extrapolate a measurement of some items of a query, sent one request after the other, to
        all its items. The first request, which computes the query, counts once.

        Args:
            first: items of the first request.
            total: items of the query.
        """
        begun = float(self.latencies[0]) / 1e3
        share = (total - first) / (self.items - first)
        seconds = begun + (self.seconds - begun) * share
        requests = math.ceil(1 + (self.requests - 1) * share)
        return replace(self, seconds=seconds, items=total, requests=requests)


def failed(record: Record) -> int | None:
    """Return the number of the first request that was neither answered nor refused with 429."""
    bad = ~np.isin(record.status, (200, REFUSED)) & ~np.isnan(record.due)
    bad |= (record.status == LOST) & np.isnan(record.done)
    return int(bad.argmax()) if bad.any() else None


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one way on one server; a row with an error has none.

    Attributes:
        scenario, way, shape, server: their names.
        requests: sent in one measurement, and `of` how many the scenario has.
        rounds: measurements.
        rates: items per second of each.
        requests_per_second: median of the measurements.
        improvement: ratio of rates to the rates of the scenario's base, measured in turn.
        base: the way that `improvement` is relative to.
        latencies: of all measurements, in milliseconds.
        refused: requests that got 429.
        notes: for people.
        error: why there are no figures.
        asked: arrivals per second; None: requests were kept in flight.
        late: 99th percentile of the time by which arrivals were sent late, in milliseconds.
        published: in place of latencies the average of a report, perhaps with PERCENTILES.
        gpu: of each measurement, what the sensors of the GPU said.
    """

    scenario: str
    way: str
    shape: str
    server: str
    requests: int = 0
    of: int = 0
    rounds: int = 0
    rates: tuple[float, ...] = ()
    requests_per_second: float = math.nan
    improvement: Interval | None = None
    base: str | None = None
    latencies: tuple[float, ...] = ()
    refused: int = 0
    notes: tuple[str, ...] = ()
    error: str | None = None
    asked: float | None = None
    late: float = math.nan
    published: tuple[float, ...] = ()
    gpu: tuple[Reading, ...] = ()

    @property
    def rate(self) -> Interval:
        """Median items per second."""
        return median(np.array(self.rates))

    @property
    def average(self) -> float:
        if self.published:
            return self.published[0]
        return float(np.mean(self.latencies)) if self.latencies else math.nan

    def percentile(self, percent: float) -> float:
        """Return a percentile of the latencies in milliseconds."""
        if self.latencies:
            return float(np.percentile(self.latencies, percent))
        told: dict[float, float] = dict(zip(PERCENTILES, self.published[1:], strict=False))
        return told.get(percent, math.nan)

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["latencies"] = [round(latency, 3) for latency in self.latencies]
        return {name: None if _is_nan(value) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        """Read the output of `as_json`; raise TypeError for another object."""
        change = values.get("improvement")
        names = ("rates", "latencies", "notes", "published", "gpu")
        lists = {name: tuple(values.get(name, ())) for name in names}
        rate = values["requests_per_second"]
        numbers = {name: _number(value) for name, value in (change or {}).items()}
        more = {
            "improvement": None if change is None else Interval(**numbers),
            "requests_per_second": _number(rate),
            "late": _number(values["late"]),
        }
        return cls(**values | lists | more)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def median(values: Float64Array) -> Interval:
    """Return the median of repeats, with an interval if there are at least FEWEST."""
    return Resamples(max(1, len(values))).quantile(values, np.arange(len(values)), 0.5)


@dataclass(slots=True)
class WayFigures:
    """All measurements of one way on one server; `done`: no more are taken."""

    shots: list[Shot] = field(default_factory=list)
    error: str | None = None
    done: bool = False

    def row(self, row: Row, base: "WayFigures | None", base_name: str | None) -> Row:
        """Return `row` with the figures, and with the improvement over `base`."""
        values = asdict(row) | {"error": self.error, "improvement": None}
        if self.error is not None or not self.shots:
            return Row(**values)
        shots = self.shots
        if base is not None and base is not self and base.shots and base.error is None:
            both = list(zip(shots, base.shots, strict=False))
            ratios = np.array([shot.rate / other.rate for shot, other in both])
            values |= {"improvement": median(ratios), "base": base_name}
        values |= {
            "rounds": len(shots),
            "rates": tuple(shot.rate for shot in shots),
            "requests_per_second": median(
                np.array([shot.requests / shot.seconds for shot in shots])
            ).value,
            "latencies": tuple(np.concatenate([shot.latencies for shot in shots]).tolist()),
            "refused": sum(shot.refused for shot in shots),
            "notes": (*row.notes, *self._notes(shots, row.asked)),
            "late": math.nan if row.asked is None else max(shot.late for shot in shots),
            "gpu": tuple(shot.gpu for shot in shots if shot.gpu),
        }
        return Row(**values)

    @staticmethod
    def _notes(shots: Sequence[Shot], asked: float | None) -> list[str]:
        notes = []
        late = max((shot.late for shot in shots if _by_the_client(shot)), default=None)
        if asked is not None and late is not None:
            notes.append(f"sent up to {late:.0f} ms late (p99): the client was the limit")
        if (busy := max(shot.busy for shot in shots)) > BUSY:
            notes.append(f"the client took {busy:.0%} of a core and may be the limit")
        if readings := [shot.gpu for shot in shots if shot.gpu]:
            notes.append(said(readings, limits()))
        return notes


def _by_the_client(shot: Shot) -> bool:
    """Return whether late sends, and not the server, made much of the latencies."""
    usual = float(np.median(shot.latencies)) if shot.latencies.size else 0.0
    return shot.late > max(LATE_MS, LATE_SHARE * usual)


def change_text(ratio: Interval | None) -> str:
    """Return a ratio as text; "none" with the interval if that has 1 in it."""
    if ratio is None or math.isnan(ratio.value):
        return "-"
    if math.isnan(ratio.low):
        return f"{ratio.value:.2f}x (under {FEWEST} repeats)"
    if ratio.low <= 1 <= ratio.high:
        return f"none ({ratio.low:.2f}x to {ratio.high:.2f}x)"
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
