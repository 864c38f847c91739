"""Promise: with several HTTP workers and several devices a lost device costs nobody an answer."""

import os
import signal

import pytest

from server.test_fronts import (
    PATIENCE,
    TWO,
    connected_anew,
    known,
    shared,
    under_load,
    watching_counters,
)
from support.serving import wait_until
from support.slow import slow
from support.tape_servers import engines_of, tape_server
from support.watched_server import samples_of

__all__ = ["known", "shared"]  # fixtures


def replicas_up(client):
    """Ask four times over new connections for the number of replicas that are up."""
    sums = []
    for _ in range(4):
        with connected_anew(client) as front:
            up = [v for (n, _), v in samples_of(front).items() if n == "gpuscore_replica_up"]
            sums.append(sum(up))
    return sums


@pytest.mark.parametrize("harm", [signal.SIGKILL, *slow(signal.SIGSTOP)])
def test_with_two_replicas_a_lost_one_costs_nobody_an_answer(known, harm):
    """Both fronts run its requests again on the other one."""
    with tape_server(PATIENCE, TWO, {"devices": "cpu,cpu"}) as (server, client):
        lost = engines_of(server)[0]

        def lose():
            os.kill(lost, harm)
            wait_until(lambda: lost not in engines_of(server) and len(engines_of(server)) == 2)
            wait_until(lambda: replicas_up(client) == [2.0] * 4)

        with watching_counters(client):
            outcome = under_load(server, known, lose)
        assert set(outcome.statuses) == {200}, outcome
        assert not outcome.broken
        samples = samples_of(client)
        rerun = [v for (name, _), v in samples.items() if name == "gpuscore_rerun_total"]
        assert len(rerun) == 2
        assert sum(rerun) > 0
        restarts = [v for (n, _), v in samples.items() if n == "gpuscore_engine_restarts_total"]
        assert sorted(restarts) == [0, 1]
