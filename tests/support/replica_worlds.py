"""Replicas in a simulated world: engines, losses, hangs and chance come from one seed.

Each replica is the engine's core over `SimulatedBackend`, stepped by the world. The oracle knows
every score from the request alone, so a lost, doubled or misordered answer is found.
"""

from collections import Counter
from concurrent.futures import Future

import numpy as np

from gpuscore.config import EngineConfig
from gpuscore.engine.plan import plan_items
from gpuscore.engine.ticket import Ticket, resolve
from gpuscore.errors import DeadlineExceeded, Unavailable
from gpuscore.processes.replicas.replicas import MAX_LOSSES, Replicas
from gpuscore.types.request import ScoreRequest
from gpuscore.types.stats import NO_STATS
from support.simulated_backend import LSE, SimulatedBackend, hashed
from support.simulation import SimulatedRunner, World


class SimulatedReplica:
    """An engine that the world steps, ends, and starts again."""

    def __init__(self, world, seed):
        self.world, self.seed = world, seed
        self.rate = 0.0
        self.waiting: list[Ticket] = []
        self.alive = False
        self.start()
        self.limits = self.backend.limits
        self.started: Future = Future()
        self.started.set_result(self.limits)

    def start(self):
        # The same numbers each time, so that all replicas have the same limits.
        self.backend = SimulatedBackend(np.random.default_rng(self.seed), {})
        self.runner = SimulatedRunner(self.backend, lambda: self.world.now, prefix_cache=True)
        self.alive = True

    def stats(self):
        return NO_STATS

    def score_all(self, requests):
        return [self._score(request) for request in requests]

    def _score(self, request):
        self.world.seen(request)
        plan = plan_items(request, self.runner.backend.limits)
        ticket = Ticket(plan, Future(), None, arrived_at=self.world.now)
        self.waiting.append(ticket)
        self.runner.add(ticket)
        return ticket.future

    def step(self):
        if not self.alive:
            return
        if any(id(ticket.request.item_ids[0]) in self.world.fatal for ticket in self.busy):
            self.lose()
            return
        self.runner.step()
        self.rate = self.rate or float(self.world.rng.integers(1, 3) * 1000)

    @property
    def busy(self):
        return [ticket for ticket in self.waiting if not ticket.future.done()]

    def lose(self):
        """End the engine, or take it for hung: in both cases its requests fail at once."""
        self.alive = False
        lost, self.waiting = self.busy, []
        for ticket in lost:
            resolve(ticket.future, Unavailable("the engine stopped", retry_after=1))

    def close(self):
        self.lose()


class ReplicaWorld:
    def __init__(self, seed, faults=True):
        self.rng = np.random.default_rng(seed)
        self.faults, self.now = faults, 0.0
        count = int(self.rng.integers(2, 6))
        self.times = Counter()  # an item's identity -> how often it was sent to a replica
        self.lonely = 0  # moments in which no replica was alive
        self.fatal = set()  # the identity of items that end the engine that gets them first
        self.replicas = [SimulatedReplica(self, seed) for _ in range(count)]
        self.front = Replicas(self.replicas, ["cpu"] * count, EngineConfig())
        self.sent: list[tuple[ScoreRequest, Future]] = []
        self.queries = [self._tokens(int(n)) for n in self.rng.integers(0, 40, 4)]

    def run(self):
        for _ in range(int(self.rng.integers(10, 50))):
            self.event()
        for _ in range(5000):
            if all(future.done() for _, future in self.sent):
                break
            self._look()
            for replica in self.replicas:
                if not replica.alive:
                    replica.start()
                replica.step()
            self.now += 0.001
        for request, future in self.sent:
            self.check(request, future)
        assert not any(self.front.tokens), "a request was never forgotten"
        return self

    def event(self):
        chance = self.rng.random()
        if chance < 0.35:
            self.submit()
        elif chance < 0.40 and self.sent:
            self.sent[int(self.rng.integers(len(self.sent)))][1].cancel()
        elif chance < 0.50 and self.faults:
            self._any().lose()
        elif chance < 0.60:
            replica = self._any()
            if not replica.alive:
                replica.start()
        else:
            for replica in self.rng.permutation(self.replicas):
                replica.step()
            self.now += 0.001
        self._look()

    def submit(self):
        requests = [self._request() for _ in range(int(self.rng.integers(1, 6)))]
        requests = [r for r in requests if self.replicas[0].runner.scheduler.fits(r)]
        futures = self.front.score_all(requests)
        self.lonely += not self.front.alive
        self.sent += zip(requests, futures, strict=True)

    def seen(self, request):
        for item in request.item_ids:
            self.times[id(item)] += 1

    def check(self, request, future):
        assert future.done(), "a request was lost"
        for item in request.item_ids:
            assert self.times[id(item)] <= MAX_LOSSES, "an item was sent too often"
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            fatal = id(request.item_ids[0]) in self.fatal
            allowed = {DeadlineExceeded} if request.deadline is not None else set()
            if self.faults or self.lonely or fatal:
                allowed |= {Unavailable}
            assert type(error) in allowed, error
            return
        result = future.result()
        assert len(result.label_logits) == len(request.item_ids)
        states = [World.states_of(request, item)[-1] for item in range(len(request.item_ids))]
        for state, labels, logits in zip(
            states, request.label_ids, result.label_logits, strict=True
        ):
            assert logits.tolist() == [hashed(state, int(label)) for label in labels], "wrong score"
        assert (result.lse is not None) == request.need_lse
        if result.lse is not None:
            assert result.lse.tolist() == [hashed(state, LSE) for state in states]
        assert result.computed_tokens > 0

    def _request(self):
        rng = self.rng
        query = self.queries[int(rng.integers(len(self.queries)))]
        count = int(rng.choice([1, 1, 3, 30]))
        items = tuple(self._tokens(int(n)) for n in rng.integers(1, 9, count))
        if self.faults and rng.random() < 0.03:
            self.fatal.add(id(items[0]))
        labels = tuple(self._tokens(int(rng.integers(1, 3))) for _ in items)
        deadline = self.now + float(rng.random()) * 0.01 if rng.random() < 0.1 else None
        need_lse = bool(rng.random() < 0.5)
        salt = str(int(rng.integers(1, 3)))
        return ScoreRequest(query, items, labels, need_lse, salt=salt, deadline=deadline)

    def _tokens(self, count):
        return self.rng.integers(0, 900, count).astype(np.int32)

    def _any(self):
        return self.replicas[int(self.rng.integers(len(self.replicas)))]

    def _look(self):
        self.lonely += not any(replica.alive for replica in self.replicas)
