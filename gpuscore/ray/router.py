"""The router of the handle: a query's home by consistent hashing, on a retry the next replica.

Ray sends the class by value to where it routes, so this module holds nothing else.
"""

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

ATTEMPT = "attempt"  # the argument of a call that counts its retries
MOST_PARTS = 8  # of a request: replicas that the router puts into an order for a query


class NextHomeRouter(ConsistentHashRouter):
    """Ray's `ConsistentHashRouter`, which sends a retry to the replica that comes after the home.

    With Ray's own, a retry would find the same replica again until Ray has noticed its loss, or
    while its engine starts again.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas in the order in which to try them."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        attempt = pending_request.kwargs.get(ATTEMPT, 0) if pending_request is not None else 0
        first = attempt % len(ranks) if ranks else 0
        return [*ranks[first:], *ranks[:first]]
