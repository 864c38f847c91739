"""Promise: whatever replicas are lost, every request is answered once, rightly and in its order."""

import os
from collections import Counter

import pytest

from gpuscore.processes.replicas import replicas
from gpuscore.processes.replicas.replicas import Replicas
from support.replica_worlds import ReplicaWorld
from support.slow import slow

SEEDS = int(os.environ.get("SIMULATED_SEEDS", "300"))
BLOCK = 15


def worlds(seeds):
    for seed in seeds:
        try:
            ReplicaWorld(seed, faults=seed % 3 > 0).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("first", [0, *slow(*range(BLOCK, SEEDS, BLOCK))])
def test_simulated_worlds(first, caplog):
    worlds(range(first, min(first + BLOCK, SEEDS)))


def test_the_worlds_hold_second_losses(monkeypatch, caplog):
    """The worlds must move and give up requests, or they would show nothing."""
    seen = Counter()
    lost = Replicas.lost

    def counted(self, flight, number, error):
        lost(self, flight, number, error)
        seen["given up" if flight.losses >= replicas.MAX_LOSSES else "moved"] += 1

    monkeypatch.setattr(Replicas, "lost", counted)
    for seed in range(60):
        worlds([seed])
        if min(seen["moved"], seen["given up"]) >= 3:
            return
    raise AssertionError(seen)


def a_lost_request_is_not_run_again(monkeypatch):
    monkeypatch.setattr(Replicas, "lost", lambda self, flight, number, error: None)


def run_again_without_end(monkeypatch):
    monkeypatch.setattr(replicas, "MAX_LOSSES", 9)


def a_moved_request_is_not_subtracted(monkeypatch):
    lost = Replicas.lost

    def counted_again(self, flight, number, error):
        self.tokens[number] += flight.request.num_tokens
        lost(self, flight, number, error)

    monkeypatch.setattr(Replicas, "lost", counted_again)


def answers_in_another_order(monkeypatch):
    sent = Replicas.score_all
    monkeypatch.setattr(Replicas, "score_all", lambda self, requests: sent(self, requests)[::-1])


PLANTS = [
    a_lost_request_is_not_run_again,
    run_again_without_end,
    a_moved_request_is_not_subtracted,
    answers_in_another_order,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch, plant, caplog):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        worlds(range(SEEDS))
