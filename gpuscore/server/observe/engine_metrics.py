"""The metrics of the engines, with the labels `model` and `replica`: its number, from 0."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from gpuscore.types.stats import BATCH_ITEMS, BATCH_TOKENS, EngineStats, ReplicaState, SizeCounts

LABELS = ("model", "replica")
_Row: TypeAlias = tuple[str, str, Callable[[EngineStats], float]]

# Counters, which outlive restarts of an engine: name, help, value.
_COUNTERS: tuple[_Row, ...] = (
    ("batches", "Forward passes", lambda s: s.counters.batches),
    ("computed_tokens", "Tokens computed", lambda s: s.counters.computed_tokens),
    (
        "prefix_cache_tokens",
        "Tokens found in the prefix cache",
        lambda s: s.counters.cached_tokens,
    ),
    ("evictions", "Cached pages freed for other requests", lambda s: s.counters.evicted_pages),
    (
        "nonfinite_scores",
        "Items whose scores were not finite; each is computed once more before its request fails",
        lambda s: s.counters.nonfinite_rows,
    ),
    ("engine_restarts", "Engine processes started after the first", lambda s: s.restarts),
)
# Gauges that have no meaning without a running engine.
_GAUGES: tuple[_Row, ...] = (
    (
        "requests_waiting",
        "Requests admitted by the engine, not yet answered",
        lambda s: s.requests,
    ),
    ("tokens_waiting", "Tokens of these requests", lambda s: s.tokens),
    ("kv_usage_ratio", "Share of the pages in use", lambda s: s.pages_used / max(1, s.pages)),
    (
        "tokens_per_second",
        "Engine speed while working, smoothed",
        lambda s: s.tokens_per_second,
    ),
    (
        "capacity_tokens_per_second",
        "The same for batches at least a quarter full, from which waits are estimated; 0 before "
        "the first",
        lambda s: s.capacity,
    ),
)


def engine_metrics(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Yield the metrics of all replicas; none of them before the model is loaded."""
    if not replicas:
        return
    devices = InfoMetricFamily("gpuscore_replica", "Device of a replica", labels=LABELS)
    up = _gauge("replica_up", "1 while the replica's engine is alive")
    heard = _gauge(
        "engine_heartbeat_age_seconds", "Time since the last sign of life of the engine's process"
    )
    for one in replicas:
        devices.add_metric(_labels(one), {"device": one.device})
        up.add_metric(_labels(one), one.alive)
        heard.add_metric(_labels(one), one.stats.heartbeat_age)
    yield from (devices, up, heard)
    yield from _counters(replicas)
    if alive := [one for one in replicas if one.alive]:
        yield from _gauges(alive)


def rerun_metric(replicas: Sequence[ReplicaState]) -> Metric:
    """Return what one process counts of its replicas; engines know nothing of it."""
    rerun = _counter(
        "rerun", "Requests, or parts of them, run again elsewhere after this replica was lost"
    )
    for one in replicas:
        rerun.add_metric(_labels(one), one.rerun)
    return rerun


def _counters(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    for name, what, value in _COUNTERS:
        family = _counter(name, what)
        for one in replicas:
            family.add_metric(_labels(one), value(one.stats))
        yield family
    oom = _counter(
        "oom",
        "Forward passes that ran out of memory: retried in smaller batches, or failed with a "
        "request",
        "outcome",
    )
    for one in replicas:
        oom.add_metric([*_labels(one), "retried"], one.stats.counters.oom_retried)
        oom.add_metric([*_labels(one), "failed"], one.stats.counters.oom_failed)
    yield oom
    done = [(_labels(one), one.stats.counters) for one in replicas]
    tokens = [(labels, counters.batch_tokens) for labels, counters in done]
    yield _histogram("batch_tokens", "Tokens of a forward pass", BATCH_TOKENS, tokens)
    items = [(labels, counters.batch_items) for labels, counters in done]
    yield _histogram("batch_items", "Items that a pass scored", BATCH_ITEMS, items)


def _gauges(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    for name, what, value in _GAUGES:
        family = _gauge(name, what)
        for one in replicas:
            family.add_metric(_labels(one), value(one.stats))
        yield family
    pages = _gauge("kv_pages", "Pages of the KV cache", "state")
    for one in replicas:
        stats = one.stats
        pages.add_metric([*_labels(one), "free"], stats.pages_free)
        pages.add_metric([*_labels(one), "cached"], stats.pages_cached)
        pages.add_metric([*_labels(one), "used"], stats.pages_used)
    yield pages


def _labels(one: ReplicaState) -> list[str]:
    return [one.model, one.replica]


def _gauge(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"gpuscore_{name}", what, labels=[*LABELS, *labels])


def _counter(name: str, what: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"gpuscore_{name}", what, labels=[*LABELS, *labels])


def _histogram(
    name: str, what: str, bounds: tuple[int, ...], sizes: "Sequence[tuple[list[str], SizeCounts]]"
) -> Metric:
    family = HistogramMetricFamily(f"gpuscore_{name}", what, labels=LABELS)
    ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
    for labels, counted in sizes:
        buckets = list(zip(ends, accumulate(counted.counts), strict=True))
        family.add_metric(labels, buckets, counted.total)
    return family
