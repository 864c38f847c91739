"""The choice of a replica for a request: by its query's beginning, else by load.

A query's home is the replica with the highest hash of (replica, salt, first full pages of the
query): rendezvous hashing (Thaler and Ravishankar, 1998), so that when a replica is lost only its
own queries move, and several servers choose alike. A request stays at home if less than a batch of
tokens waits there, because it will then run in the next batch. Else it goes where the least waits.
"""

from collections.abc import Mapping
from hashlib import blake2b

from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest

# Tokens of a query that choose its home: longer than most instructions, so that queries that share
# one are spread, and shorter than most histories, so that one that grows stays at home.
HOME_TOKENS = 1024


def choose(request: ScoreRequest, loads: Mapping[int, int], limits: BackendLimits) -> int:
    """Return the replica for a request.

    Args:
        loads: the tokens in flight at each replica that is ready, by its number; at least one.
        limits: the limits that every replica has.
    """
    home = None
    if digest := home_digest(request, limits.page_size):
        seeds = {replica: replica.to_bytes(8, "little") for replica in loads}
        home = max(loads, key=lambda n: blake2b(digest, digest_size=8, salt=seeds[n]).digest())
        if loads[home] < limits.max_tokens:
            return home
    # Another replica has to compute the query again.
    again = len(request.query_ids)
    return min(loads, key=lambda replica: loads[replica] + (again if replica != home else 0))


def home_digest(request: ScoreRequest, page_size: int) -> bytes | None:
    """Return a digest of the query's beginning, which tells its home; None without a full page."""
    tokens = min(len(request.query_ids), HOME_TOKENS) // page_size * page_size
    if not tokens:
        return None
    start = request.query_ids[:tokens].astype("<i4").tobytes()
    return blake2b(request.salt.encode() + b"\0" + start, digest_size=16).digest()
