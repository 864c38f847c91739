"""Figures of measurements: rates, times and latencies, each with its interval over the repeats."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gpuscore.measure.intervals import Interval, median
from gpuscore.measure.load import LOST, Record
from gpuscore.types.batch import Float64Array

REFUSED = 429
BUSY = 0.85  # if the client's thread took more of a core, the client may have been the limit
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Shot:
    """One measurement of a mode.

    Attributes:
        seconds: time between the first arrival and the last answer.
        items, requests: how many were answered.
        latencies: [requests] in milliseconds, of the requests that were answered.
        refused: requests that got 429.
        late: 99th percentile of the time by which requests were sent late, in milliseconds.
        busy: share of a core that the client took.
    """

    seconds: float
    items: int
    requests: int
    latencies: Float64Array
    refused: int
    late: float
    busy: float

    @classmethod
    def of(cls, record: Record, items: Sequence[int]) -> "Shot":
        """Measure a record; `items` has the number of items of each request."""
        good = record.status == 200
        late = (record.sent - record.due)[~np.isnan(record.sent)]
        return cls(
            seconds=record.seconds,
            items=int(np.asarray(items)[good].sum()),
            requests=int(good.sum()),
            latencies=record.latency[good] * 1e3,
            refused=int((record.status == REFUSED).sum()),
            late=float(np.percentile(late, 99)) * 1e3 if late.size else 0.0,
            busy=record.client_seconds / max(record.seconds, 1e-9),
        )

    def extrapolated(self, first: int, total: int) -> "Shot":
        """Extrapolate from some items of a query, sent one request after the other, to all items.
        Only the first request computes the query, so its time is not multiplied.

        Args:
            first: items of the first request.
            total: items of the query.
        """
        begun = float(self.latencies[0]) / 1e3
        factor = (total - first) / (self.items - first)
        seconds = begun + (self.seconds - begun) * factor
        requests = math.ceil(1 + (self.requests - 1) * factor)
        return replace(self, seconds=seconds, items=total, requests=requests)


def failed(record: Record) -> int | None:
    """Return the number of the first request that was neither answered nor refused with 429."""
    bad = ~np.isin(record.status, (200, REFUSED)) & ~np.isnan(record.due)
    bad |= (record.status == LOST) & np.isnan(record.done)
    return int(bad.argmax()) if bad.any() else None


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one mode on one server; a row with an error has none.

    Attributes:
        rates: items per second of each measurement.
        requests_per_second: median of the measurements.
        latencies: those of all measurements, in milliseconds.
        refused: requests that got 429.
        error: why there are no figures.
        late: 99th percentile of the time by which arrivals were sent late, in milliseconds; NaN:
            requests were kept in flight.
        published: a report's average, perhaps with PERCENTILES, in place of `latencies`.
    """

    scenario: str
    way: str  # the mode's name
    shape: str
    server: str
    rates: tuple[float, ...] = ()
    requests_per_second: float = math.nan
    latencies: tuple[float, ...] = ()
    refused: int = 0
    notes: tuple[str, ...] = ()
    error: str | None = None
    late: float = math.nan
    published: tuple[float, ...] = ()

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
        published: dict[float, float] = dict(zip(PERCENTILES, self.published[1:], strict=False))
        return published.get(percent, math.nan)


def measured(row: Row, shots: Sequence[Shot], arrive: bool = False) -> Row:
    """Return `row` with the figures of its measurements; with `arrive`, requests arrived at given
    times instead of being kept in flight."""
    notes = list(row.notes)
    if (busy := max(shot.busy for shot in shots)) > BUSY:
        notes.append(f"the client took {busy:.0%} of a core and may be the limit")
    return replace(
        row,
        rates=tuple(shot.items / shot.seconds for shot in shots),
        requests_per_second=float(np.median([shot.requests / shot.seconds for shot in shots])),
        latencies=tuple(np.concatenate([shot.latencies for shot in shots]).round(3).tolist()),
        refused=sum(shot.refused for shot in shots),
        notes=tuple(notes),
        late=max(shot.late for shot in shots) if arrive else math.nan,
    )


def report_rows() -> list[Row]:
    """Return the figures of the published reports whose experiments the scenarios repeat."""
    reports = json.loads(Path(__file__).with_name("reports.json").read_text(encoding="utf-8"))
    return [
        Row(
            *(scenario, mode, shape, server["name"]),
            rates=() if rate is None or scenario == "concurrency" else (rate,),
            requests_per_second=rate if scenario == "concurrency" else math.nan,
            published=tuple(latencies),
            notes=(report["source"],),
        )
        for report in reports
        for server in report["servers"]
        for scenario, mode, shape, rate, latencies in server["rows"]
    ]
