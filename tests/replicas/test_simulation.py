"""Promise: whatever replicas are lost, every request is answered once, rightly and in its order."""

import os

import pytest

from gpuscore.processes.replicas import flight, replicas
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


def test_the_worlds_hold_divided_requests_and_second_losses(monkeypatch, caplog):
    """The worlds must divide, move and give up requests, or they would show nothing."""
    seen = {"divided": 0, "moved": 0, "given up": 0}
    divide, reroute, end = flight.split, Replicas._reroute, Replicas._end

    def counted_split(request, sizes):
        parts = divide(request, sizes)
        seen["divided"] += len(parts) > 1
        return parts

    def counted_reroute(self, *arguments):
        moved = reroute(self, *arguments)
        seen["moved"] += moved
        return moved

    def counted_end(self, flight, error):
        seen["given up"] += flight.losses >= replicas.MAX_LOSSES
        end(self, flight, error)

    monkeypatch.setattr(replicas, "split", counted_split)
    monkeypatch.setattr(Replicas, "_reroute", counted_reroute)
    monkeypatch.setattr(Replicas, "_end", counted_end)
    for seed in range(60):
        worlds([seed])
        if min(seen.values()) >= 3:
            return
    raise AssertionError(seen)


def results_in_the_order_of_arrival(monkeypatch):
    join = flight.join
    monkeypatch.setattr(flight, "join", lambda results: join(results[::-1]))


def a_lost_request_is_not_run_again(monkeypatch):
    monkeypatch.setattr(Replicas, "_lost", lambda self, part, error: None)


def run_again_without_end(monkeypatch):
    monkeypatch.setattr(replicas, "MAX_LOSSES", 9)


def a_moved_part_is_not_subtracted(monkeypatch):
    forget = Replicas._forget

    def sometimes(self, part):
        if not part.flight.losses:
            forget(self, part)

    monkeypatch.setattr(Replicas, "_forget", sometimes)


def a_refusal_loses_the_part(monkeypatch):
    reroute = Replicas._reroute

    def only_after_losses(self, part, refused=()):
        return reroute(self, part, refused) if part.flight.losses else False

    monkeypatch.setattr(Replicas, "_reroute", only_after_losses)


def the_last_item_of_a_part_is_left_out(monkeypatch):
    def short(request, sizes):
        parts = flight.split(request, sizes)
        if len(parts) > 1:
            items, labels = parts[0].item_ids[:-1], parts[0].label_ids[:-1]
            parts[0] = flight.replace(parts[0], item_ids=items, label_ids=labels)
        return parts

    monkeypatch.setattr(replicas, "split", short)


PLANTS = [
    results_in_the_order_of_arrival,
    a_lost_request_is_not_run_again,
    run_again_without_end,
    a_moved_part_is_not_subtracted,
    a_refusal_loses_the_part,
    the_last_item_of_a_part_is_left_out,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch, plant, caplog):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        worlds(range(SEEDS))
