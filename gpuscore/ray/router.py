"""The router of the deployment handle. Ray sends it by value, so this module holds nothing else."""

from random import sample

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedFirst(RequestRouter):
    """Sends a call to the replica that `replica` names, or to another if that is gone or full."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas in the order in which to try them."""
        preferred = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full
            preferred = pending_request.kwargs.get("replica")
        order = sample(candidate_replicas, len(candidate_replicas))
        order.sort(key=lambda replica: replica.replica_id.unique_id != preferred)
        return [[replica] for replica in order]
