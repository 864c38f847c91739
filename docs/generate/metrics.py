"""Reference of the metrics, from what a server exposes at /metrics."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from generate.markdown import code, page, table
from gpuscore.server.observe.metrics import Metrics, ServerState
from gpuscore.server.observe.record import RequestRecord
from gpuscore.stats import NO_STATS


def page_of_metrics() -> str:
    rows = [(_name(one), one.type, _labels(one), one.documentation) for one in families()]
    return page(
        "Metrics",
        "What `GET /metrics` exposes, in Prometheus' text format or OpenMetrics. It wants the API "
        "key. [Monitoring](../how-to/monitor.md) has a scrape job, alerts and a dashboard.",
        table(("metric", "type", "labels", "meaning"), rows),
        "Times are in seconds, sizes in bytes. Labels never hold anything that a caller wrote. "
        "Counters of the engine come with its heartbeat and go on when its process is replaced: "
        "they never go back, but what a process did in its last quarter of a second before it was "
        "lost is not in them. Gauges of the engine are there only while it runs.",
    )


def families() -> list[Metric]:
    """All metrics of a server whose engine is running."""
    state = ServerState(
        up=True,
        ready=True,
        running=0,
        log_lines_dropped=0,
        connections_refused=0,
        engine=NO_STATS,
        engine_alive=True,
    )
    metrics = Metrics(lambda: state)
    metrics.finished(RequestRecord("id"))  # shows the labels of what is counted by request
    return list(metrics.registry.collect())


def _name(metric: Metric) -> str:
    ending = {"counter": "_total", "info": "_info"}.get(metric.type, "")
    return code(metric.name + ending)


def _labels(metric: Metric) -> str:
    names: dict[str, set[str]] = {}
    for sample in metric.samples:
        for name, value in sample.labels.items():
            if name not in ("le", "version"):
                names.setdefault(name, set()).add(value)
    return ", ".join(_label(name, values) for name, values in names.items())


def _label(name: str, values: Iterable[str]) -> str:
    shown = sorted(values)
    return code(name) if not 1 < len(shown) < 7 else f"{code(name)} ({', '.join(shown)})"
