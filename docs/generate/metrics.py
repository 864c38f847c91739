"""The reference page of the metrics, from those that a server exposes at /metrics."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from generate.markdown import code, page, table
from gpuscore.dialects.served import ServedModel
from gpuscore.server.observe.engine_metrics import engine_metrics
from gpuscore.server.observe.operations import Operations
from gpuscore.server.service import ScoringService
from gpuscore.types.record import RequestRecord
from gpuscore.types.stats import NO_STATS, ReplicaState


def page_of_metrics() -> str:
    rows = [
        (_name(family), family.type, _labels(family), family.documentation) for family in families()
    ]
    return page(
        "Metrics",
        "`GET /metrics` exposes these metrics in Prometheus' text format or OpenMetrics. It needs "
        "the API key. [Monitoring](../how-to/monitor.md) has a scrape job, alerts and a dashboard.",
        table(("metric", "type", "labels", "meaning"), rows),
        "Times are in seconds, sizes in bytes. Labels never hold anything that a caller wrote. "
        "Counters of the engine come with its heartbeat and never go back, even if its process is "
        "replaced. They do not include the work of a lost process in its last quarter of a second. "
        "Gauges of an engine are exposed only while it runs. `replica` is the engine's number in "
        "`--devices`, `0` if there is one; add up over it for the whole server.",
    )


def families() -> list[Metric]:
    """Return all metrics of a server whose engine is running."""
    operations = Operations(ScoringService([ServedModel("demo")]))
    operations.metrics.finished(RequestRecord("id"))  # or metrics per request would show no labels
    replica = ReplicaState("0", "cpu", alive=True, stats=NO_STATS)
    return [*operations.metrics.registry.collect(), *engine_metrics([replica])]


def _name(metric: Metric) -> str:
    ending = {"counter": "_total", "info": "_info"}.get(metric.type, "")
    return code(metric.name + ending)


def _labels(metric: Metric) -> str:
    names: dict[str, set[str]] = {}
    for sample in metric.samples:
        for name, value in sample.labels.items():
            if name not in ("le", "version", "device"):
                names.setdefault(name, set()).add(value)
    return ", ".join(_label(name, values) for name, values in names.items())


def _label(name: str, values: Iterable[str]) -> str:
    shown = sorted(values)
    return code(name) if not 1 < len(shown) < 7 else f"{code(name)} ({', '.join(shown)})"
