"""The autoscaling policy: as many engines as keep the expected wait at its target.

Ray sends the class by value to its controller, so this module holds nothing else.
"""

from typing import Any

from ray.serve.config import AutoscalingContext

WAIT = "queued_seconds"  # the metric that each replica reports


class ExpectedWait:
    """Asks for `waits / target_wait` engines: the sum of the replicas' seconds of queued work.

    Ray then applies the bounds and delays of its autoscaling configuration. Requests that wait in
    handles, because all replicas are full, count as much as those that replicas have.

    Args:
        target_wait: seconds of queued work per engine.
    """

    def __init__(self, target_wait: float) -> None:
        self._target = target_wait

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of engines, and no state."""
        reported = (context.aggregated_metrics or {}).get(WAIT, {})
        if not reported:  # nothing was heard yet
            return context.target_num_replicas, {}
        queued = context.total_queued_requests or 0.0
        running = max(1.0, context.total_num_requests - queued)
        return sum(reported.values()) * (1.0 + queued / running) / self._target, {}
