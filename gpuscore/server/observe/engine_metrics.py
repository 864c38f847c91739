"""The metrics of the engines, with the labels `model` and `replica` (its number, from 0)."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from gpuscore.types.stats import ReplicaState

LABELS = ("model", "replica")
_Rows = tuple[tuple[str, str, str], ...]  # name, help, and the attribute of a `ReplicaState`

_STATES: _Rows = (
    ("replica_up", "1 while the replica's engine is alive", "alive"),
    (
        "engine_heartbeat_age_seconds",
        "Time since the last heartbeat of the engine process",
        "stats.heartbeat_age",
    ),
)
# Counters, which outlive restarts of an engine.
_COUNTERS: _Rows = (
    (
        "rerun",
        "Requests, or parts of them, run again elsewhere after this replica was lost",
        "rerun",
    ),
    ("batches", "Forward passes", "stats.counters.batches"),
    ("computed_tokens", "Tokens computed", "stats.counters.computed_tokens"),
    ("prefix_cache_tokens", "Tokens found in the prefix cache", "stats.counters.cached_tokens"),
    ("evictions", "Cached pages freed for other requests", "stats.counters.evicted_pages"),
    (
        "state_evictions",
        "Cached states of linear layers freed for other requests",
        "stats.counters.evicted_states",
    ),
    (
        "nonfinite_scores",
        "Items whose scores were not finite; each is computed once more before its request fails",
        "stats.counters.nonfinite_rows",
    ),
    ("engine_restarts", "Engine processes started after the first", "stats.restarts"),
)
# Gauges that have no meaning without a running engine.
_GAUGES: _Rows = (
    ("requests_waiting", "Requests in the engine that are not answered yet", "stats.requests"),
    ("tokens_waiting", "Tokens of these requests", "stats.tokens"),
    ("kv_usage_ratio", "Share of the pages in use", "stats.pages_ratio"),
    ("tokens_per_second", "Engine speed while working, smoothed", "stats.tokens_per_second"),
    (
        "capacity_tokens_per_second",
        "The same for batches that are at least a quarter full; waits are estimated from it. 0 "
        "before the first such batch",
        "stats.capacity",
    ),
)
# Families with one more label: name, help, and an attribute for each value of the label.
_OOM = (
    "oom",
    "Forward passes that ran out of memory: retried in smaller batches, or failed with a request",
    {name: f"stats.counters.oom_{name}" for name in ("retried", "failed")},
)
_KEPT = tuple(
    (name, what, {state: f"stats.{kind}_{state}" for state in ("free", "cached", "used")})
    for name, what, kind in (
        ("kv_pages", "Pages of the KV cache", "pages"),
        ("state_slots", "Slots for states of linear layers", "states"),
    )
)


def engine_metrics(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Yield the metrics of all replicas; no metrics before the model is loaded."""
    if not replicas:
        return
    devices = InfoMetricFamily("gpuscore_replica", "Device of a replica", labels=LABELS)
    for replica in replicas:
        devices.add_metric(_labels(replica), {"device": replica.device})
    yield devices
    yield from _families(GaugeMetricFamily, _STATES, replicas)
    yield from _families(CounterMetricFamily, _COUNTERS, replicas)
    yield _divided(CounterMetricFamily, *_OOM, "outcome", replicas)
    tokens = SummaryMetricFamily("gpuscore_batch_tokens", "Tokens of a forward pass", labels=LABELS)
    items = SummaryMetricFamily("gpuscore_batch_items", "Items that a pass scored", labels=LABELS)
    for replica in replicas:
        done = replica.stats.counters
        tokens.add_metric(_labels(replica), done.batches, done.computed_tokens)
        items.add_metric(_labels(replica), done.batches, done.batch_items)
    yield from (tokens, items)
    if alive := [replica for replica in replicas if replica.alive]:
        yield from _families(GaugeMetricFamily, _GAUGES, alive)
        for kept in _KEPT:
            yield _divided(GaugeMetricFamily, *kept, "state", alive)


_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


def _labels(replica: ReplicaState) -> list[str]:
    return [replica.model, replica.replica]


def _families(kind: _Kind, rows: _Rows, replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each replica."""
    for name, what, attribute in rows:
        family = kind(f"gpuscore_{name}", what, labels=LABELS)
        for replica in replicas:
            family.add_metric(_labels(replica), attrgetter(attribute)(replica))
        yield family


def _divided(
    kind: _Kind,
    name: str,
    what: str,
    parts: Mapping[str, str],
    label: str,
    replicas: Sequence[ReplicaState],
) -> Metric:
    """Return a family with one more label, whose values are the names of `parts`."""
    family = kind(f"gpuscore_{name}", what, labels=[*LABELS, label])
    for replica in replicas:
        for value, attribute in parts.items():
            family.add_metric([*_labels(replica), value], attrgetter(attribute)(replica))
    return family
