"""The metrics that routers of vLLM servers read, under vLLM's names (`--vllm-metrics`).

Readers take the first series of a name, so there is one for each model, with the sum over its
replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpuscore.types.stats import EngineStats, ReplicaState

LABEL = "model_name"
_Value: TypeAlias = Callable[[Sequence[EngineStats]], float]


def _usage(stats: Sequence[EngineStats]) -> float:
    return sum(one.pages_used for one in stats) / max(1, sum(one.pages for one in stats))


# Of engines that are alive: name, help, value.
_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    (
        "num_requests_running",
        "Requests that have been in a batch and are not answered",
        lambda stats: sum(one.running for one in stats),
    ),
    (
        "num_requests_waiting",
        "Requests admitted by the engine of which nothing was computed yet",
        lambda stats: sum(max(0, one.requests - one.running) for one in stats),
    ),
    ("kv_cache_usage_perc", "Share of the pages in use, 1 = all", _usage),
    ("gpu_cache_usage_perc", "The same under an older name", _usage),
)
# Of all engines.
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    (
        "gpu_prefix_cache_queries",
        "Tokens that were looked for in the prefix cache or computed",
        lambda stats: sum(s.counters.cached_tokens + s.counters.computed_tokens for s in stats),
    ),
    (
        "gpu_prefix_cache_hits",
        "Tokens found in the prefix cache",
        lambda stats: sum(one.counters.cached_tokens for one in stats),
    ),
)


def vllm_metrics(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    """Yield them for all models; gauges only of models of which an engine is alive."""
    models = dict.fromkeys(one.model for one in replicas)
    for name, what, value in _GAUGES:
        gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=[LABEL])
        for model in models:
            if alive := [one.stats for one in replicas if one.model == model and one.alive]:
                gauge.add_metric([model], value(alive))
        yield gauge
    for name, what, value in _COUNTERS:
        counter = CounterMetricFamily(f"vllm:{name}", what, labels=[LABEL])
        for model in models:
            counter.add_metric(
                [model], value([one.stats for one in replicas if one.model == model])
            )
        yield counter
