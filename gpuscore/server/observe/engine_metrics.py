"""The metrics of the engines: ours, with the labels `model` and `replica` (its number, from 0), and
those that routers of vLLM servers read, under vLLM's names.

Readers of vLLM's names take the first series of a name, so there is one for each model, with the
sum over its replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from gpuscore.types.stats import EngineStats, ReplicaState

LABELS, VLLM_LABELS = ("model", "replica"), ("model_name",)
SourceT = TypeVar("SourceT")
_Row: TypeAlias = tuple[str, str, Callable[[SourceT], float]]  # name, help, value
_Sources: TypeAlias = Sequence[tuple[list[str], SourceT]]  # values of labels, and what has values

_STATES: tuple[_Row[ReplicaState], ...] = (
    ("replica_up", "1 while the replica's engine is alive", lambda r: r.alive),
    (
        "engine_heartbeat_age_seconds",
        "Time since the last sign of life of the engine's process",
        lambda r: r.stats.heartbeat_age,
    ),
)
_RERUN: tuple[_Row[ReplicaState], ...] = (
    (
        "rerun",
        "Requests, or parts of them, run again elsewhere after this replica was lost",
        lambda r: r.rerun,
    ),
)
# Counters, which outlive restarts of an engine.
_COUNTERS: tuple[_Row[EngineStats], ...] = (
    ("batches", "Forward passes", lambda s: s.counters.batches),
    ("computed_tokens", "Tokens computed", lambda s: s.counters.computed_tokens),
    (
        "prefix_cache_tokens",
        "Tokens found in the prefix cache",
        lambda s: s.counters.cached_tokens,
    ),
    ("evictions", "Cached pages freed for other requests", lambda s: s.counters.evicted_pages),
    (
        "state_evictions",
        "Cached states of linear layers freed for other requests",
        lambda s: s.counters.evicted_states,
    ),
    (
        "nonfinite_scores",
        "Items whose scores were not finite; each is computed once more before its request fails",
        lambda s: s.counters.nonfinite_rows,
    ),
    ("engine_restarts", "Engine processes started after the first", lambda s: s.restarts),
)
# Gauges that have no meaning without a running engine.
_GAUGES: tuple[_Row[EngineStats], ...] = (
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
# What a living engine keeps between requests: name, help, and the beginning of its fields' names.
_KEPT = (
    ("kv_pages", "Pages of the KV cache", "pages"),
    ("state_slots", "Slots for states of linear layers", "states"),
)


def _usage(stats: Sequence[EngineStats]) -> float:
    pages = sum(engine.pages for engine in stats)
    return sum(engine.pages_used for engine in stats) / max(1, pages)


# Of engines that are alive.
_VLLM_GAUGES: tuple[_Row[Sequence[EngineStats]], ...] = (
    (
        "num_requests_running",
        "Requests that have been in a batch and are not answered",
        lambda stats: sum(engine.running for engine in stats),
    ),
    (
        "num_requests_waiting",
        "Requests admitted by the engine, before any part of them is computed",
        lambda stats: sum(max(0, engine.requests - engine.running) for engine in stats),
    ),
    ("kv_cache_usage_perc", "Share of the pages in use, 1 = all", _usage),
    ("gpu_cache_usage_perc", "The same under an older name", _usage),
)
# Of all engines.
_VLLM_COUNTERS: tuple[_Row[Sequence[EngineStats]], ...] = (
    (
        "gpu_prefix_cache_queries",
        "Tokens that were looked for in the prefix cache or computed",
        lambda stats: sum(s.counters.cached_tokens + s.counters.computed_tokens for s in stats),
    ),
    (
        "gpu_prefix_cache_hits",
        "Tokens found in the prefix cache",
        lambda stats: sum(engine.counters.cached_tokens for engine in stats),
    ),
)


def engine_metrics(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Yield the metrics of all replicas; no metrics before the model is loaded."""
    if not replicas:
        return
    devices = InfoMetricFamily("gpuscore_replica", "Device of a replica", labels=LABELS)
    for replica in replicas:
        devices.add_metric(_labels(replica), {"device": replica.device})
    yield devices
    states = [(_labels(replica), replica) for replica in replicas]
    yield from _families(GaugeMetricFamily, "gpuscore_", LABELS, _STATES, states)
    yield from _families(CounterMetricFamily, "gpuscore_", LABELS, _RERUN, states)
    every = [(_labels(replica), replica.stats) for replica in replicas]
    yield from _families(CounterMetricFamily, "gpuscore_", LABELS, _COUNTERS, every)
    oom = CounterMetricFamily(
        "gpuscore_oom",
        "Forward passes that ran out of memory: retried in smaller batches, or failed with a "
        "request",
        labels=[*LABELS, "outcome"],
    )
    for labels, stats in every:
        oom.add_metric([*labels, "retried"], stats.counters.oom_retried)
        oom.add_metric([*labels, "failed"], stats.counters.oom_failed)
    yield oom
    tokens = SummaryMetricFamily("gpuscore_batch_tokens", "Tokens of a forward pass", labels=LABELS)
    items = SummaryMetricFamily("gpuscore_batch_items", "Items that a pass scored", labels=LABELS)
    for labels, stats in every:
        done = stats.counters
        tokens.add_metric(labels, done.batches, done.computed_tokens)
        items.add_metric(labels, done.batches, done.batch_items)
    yield from (tokens, items)
    if alive := [(_labels(replica), replica.stats) for replica in replicas if replica.alive]:
        yield from _families(GaugeMetricFamily, "gpuscore_", LABELS, _GAUGES, alive)
        for name, what, kind in _KEPT:
            kept = GaugeMetricFamily(f"gpuscore_{name}", what, labels=[*LABELS, "state"])
            for own, stats in alive:
                for state in ("free", "cached", "used"):
                    kept.add_metric([*own, state], getattr(stats, f"{kind}_{state}"))
            yield kept


def vllm_metrics(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Yield vLLM's metrics for all models; gauges only of models with a living engine."""
    models = dict.fromkeys(replica.model for replica in replicas)
    of = {name: [replica for replica in replicas if replica.model == name] for name in models}
    living = {name: [replica.stats for replica in of[name] if replica.alive] for name in models}
    alive = [([name], stats) for name, stats in living.items() if stats]
    yield from _families(GaugeMetricFamily, "vllm:", VLLM_LABELS, _VLLM_GAUGES, alive)
    every = [([name], [replica.stats for replica in of[name]]) for name in models]
    yield from _families(CounterMetricFamily, "vllm:", VLLM_LABELS, _VLLM_COUNTERS, every)


def _labels(replica: ReplicaState) -> list[str]:
    return [replica.model, replica.replica]


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    prefix: str,
    labels: Sequence[str],
    rows: Sequence[_Row[SourceT]],
    sources: _Sources[SourceT],
) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each source."""
    for name, what, value in rows:
        family = kind(f"{prefix}{name}", what, labels=labels)
        for own, source in sources:
            family.add_metric(own, value(source))
        yield family
