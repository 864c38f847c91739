"""The engine's core in a simulated world: backend, clock and chance come from one seed.

The backend's pages hold exactly the (tenant, position, token) triples that were written. A score is
a hash of the triples that a row reads back through the page table, its parent and its own segment;
the oracle computes the same hash from the request alone. Any error in pages, parents, positions,
caching, retries or tenants therefore changes a score. So does any error in states, which hold the
triples that they were made of, in worlds that have them.
"""

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from gpuscore.engine.jobs import ScheduledChunk
from gpuscore.engine.plan import plan_items
from gpuscore.engine.runner import Runner
from gpuscore.engine.ticket import Ticket
from gpuscore.errors import (
    DeadlineExceeded,
    InsufficientMemory,
    InternalError,
    NonfiniteScore,
    Unavailable,
)
from gpuscore.types.batch import NO_ROWS, Rows
from gpuscore.types.request import LabelTrie, Readouts, ScoreRequest, ScoreResult
from support.batches import every_token
from support.simulated_backend import LSE, TOP_ID, TOP_LOGIT, SimulatedBackend, hashed, triples


class SimulatedRunner(Runner):
    """A runner that tells the backend the tenants of a batch, which no real backend needs."""

    def __init__(self, backend: Any, *settings: Any, **options: Any) -> None:
        super().__init__(backend, *settings, **options)
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda: self.announced(schedule())  # type: ignore[method-assign]

    def announced(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Tell the backend about a batch, which is launched next."""
        tenants = []
        unit = self.scheduler.chunk_unit
        for chunk in chunks:
            start, stop = chunk.query
            assert start % unit == 0 or start == stop == chunk.job.query_length
            assert stop % unit == 0 or stop == chunk.job.query_length
            prefixes = (bool(chunk.items) or stop > start) + bool(chunk.long)
            tenants += [int(chunk.job.request.salt)] * prefixes
        self.backend.tenants = tenants  # type: ignore[attr-defined]
        return chunks


@dataclass
class World:
    """One simulated life of an engine; `run` raises AssertionError if a promise is broken."""

    seed: int
    faults: dict[str, float] = field(default_factory=dict)
    num_states: int = 0  # slots of the backend for states
    events: ClassVar = (5, 25)  # least number of them, and most

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.now = 0.0
        self.backend = self.make_backend()
        self.runner = self.make_runner(prefix_cache=bool(self.rng.random() < 0.9))
        pool = self.runner.scheduler.pages
        allocate = pool.allocate
        pool.allocate = lambda n: None if self.backend.strikes("pages") else allocate(n)  # type: ignore[method-assign]
        self.states = self.runner.scheduler.states
        self.tickets: list[Ticket] = []
        self.queries = [self._tokens(int(n)) for n in self.rng.integers(0, 40, 3)]

    def make_backend(self) -> Any:
        return SimulatedBackend(self.rng, self.faults, self.num_states)

    def make_runner(self, *, prefix_cache: bool) -> Runner:
        return SimulatedRunner(self.backend, lambda: self.now, prefix_cache=prefix_cache)

    def run(self) -> Self:
        for _ in range(int(self.rng.integers(*self.events))):
            self.event()
        if self.rng.random() < 0.1:  # stopped at once, in the middle of a batch
            self.runner.fail_all(Unavailable("stopping", retry_after=1))
        for _ in range(5000):
            if self.runner.idle:
                break
            self.step()
        assert self.runner.idle, "work is left and nothing happens"
        self.step()
        self.check_pages()
        for ticket in self.tickets:
            self.check(ticket)
        return self

    def _tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, 1000, count).astype(np.int32)

    def event(self) -> None:
        chance = self.rng.random()
        if chance < 0.35:
            self._submit()
        elif chance < 0.42 and self.tickets:
            self.tickets[int(self.rng.integers(len(self.tickets)))].future.cancel()
        elif chance < 0.47:
            self.runner.scheduler.pages.evict(int(self.rng.integers(1, 50)))
        elif chance < 0.5:
            self.now += 1
        else:
            self.step()

    def step(self) -> None:
        self.now += 0.001 if not self.backend.strikes("slow") else 0.5
        self.runner.step()
        scheduler = self.runner.scheduler
        scheduler.pages.check_integrity()
        self.states.check_integrity()
        assert scheduler.token_budget <= self.backend.limits.max_tokens

    def _submit(self) -> None:
        rng = self.rng
        query = self.queries[int(rng.integers(len(self.queries)))]
        if rng.random() < 0.3:  # a shared beginning with another end
            query = np.concatenate([query, self._tokens(int(rng.integers(1, 20)))])
        longest = int(rng.choice([4, 12, 30, 60]))
        items = [self._tokens(int(n)) for n in rng.integers(1, longest, int(rng.integers(1, 7)))]
        labels = [self._tokens(int(rng.integers(1, 3))) for _ in items]
        every = self.seed % 5 == 4 and bool(rng.random() < 0.7)
        if self.seed % 5 == 2:  # some items share their beginnings
            start = self._tokens(int(rng.integers(1, 25)))
            items = [np.concatenate([start, i]) if rng.random() < 0.7 else i for i in items]
        readouts = None
        if every:
            query, items, labels, readouts = self._read(query, items)
        trie = self._trie() if self.seed % 5 == 3 else None
        if trie is not None:
            labels = [trie.first_ids] * len(items)
        if trie is not None and rng.random() < 0.5:
            rows = [self._some_rows(item, len(trie.first_ids)) for item in items]
            labels = [np.tile(trie.first_ids, len(own.places)) for own in rows]
            readouts = Readouts.of([NO_ROWS, *rows])
        request = ScoreRequest(
            query,
            tuple(items),
            tuple(labels),
            need_lse=bool(rng.random() < 0.5) or trie is not None,
            priority=int(rng.integers(-1, 2)),
            salt=str(int(rng.integers(1, 3))),
            deadline=self.now + float(rng.random()) if rng.random() < 0.1 else None,
            num_top=(0, 1, 3)[int(3 * rng.random())] if every else 0,
            readouts=readouts,
            trie=trie,
        )
        plan = plan_items(request, self.backend.limits, trees_per_batch=1)
        if not self.runner.scheduler.fits(plan):
            return
        if self.backend.strikes("poison"):
            self.backend.poison.add(self.states_of(request, 0)[-1])
        ticket = Ticket(plan, Future(), None, arrived_at=self.now)
        self.tickets.append(ticket)
        self.runner.add(ticket)

    @staticmethod
    def _some_rows(tokens: np.ndarray, labels: int = 0) -> Rows:
        """Return the rows of a third of the tokens and of the last one, with 1 or 2 labels each,
        which depend on the token alone."""
        places = np.append(np.flatnonzero(tokens[:-1] % 3 == 0), len(tokens) - 1).astype(np.int32)
        counts = tokens[places] % 2 + 1
        counts = np.full_like(counts, labels) if labels else counts
        ids = np.repeat(tokens[places], counts) + np.arange(counts.sum(), dtype=np.int32)
        return Rows(places, counts, ids)

    def _read(self, query: np.ndarray, items: list[np.ndarray]) -> tuple:
        """Return query, items, labels and read-outs of a request for several tokens of an item.

        The labels of every token's row are the tokens that follow, so that rows of shared
        beginnings have equal ones; those of some tokens' rows depend on the token alone. Sometimes
        the query is not scored, sometimes there is none.
        """
        rng = self.rng
        start = self._tokens(int(rng.integers(1, 15)))
        items = [np.concatenate([start, i]) if rng.random() < 0.5 else i for i in items]
        labels = [np.append(item[1:], item[:1]) for item in items]
        kind = rng.random()
        query = query[:0] if kind < 0.3 else query
        asked = query[: len(query) * (kind < 0.8)]
        if rng.random() < 0.5:
            query_labels = np.append(query[1:], items[0][:1])[: len(asked)]
            return query, items, labels, every_token(items, query_labels)
        rows = [self._some_rows(run) if len(run) else NO_ROWS for run in (asked, *items)]
        return query, items, [own.labels for own in rows[1:]], Readouts.of(rows)

    def _trie(self) -> LabelTrie | None:
        """Return labels of a few different tokens, which share beginnings; None in some requests.

        Some labels have one token.
        """
        if self.rng.random() < 0.3:
            return None
        lengths = self.rng.integers(1, 5, int(self.rng.integers(1, 5)))
        return LabelTrie(tuple(tuple(self.rng.integers(0, 3, n).tolist()) for n in lengths))

    @staticmethod
    def _prompt(request: ScoreRequest, item: int) -> np.ndarray:
        return np.concatenate([request.query_ids, request.item_ids[item]])

    @classmethod
    def states_of(cls, request: ScoreRequest, item: int) -> list[int]:
        """Return the hash states of the item's tokens that are scored."""
        seen = triples(int(request.salt), 0, cls._prompt(request, item))
        ends = np.array([len(seen)])
        if request.readouts is not None:
            ends = request.readouts.places[1 + item] + len(request.query_ids) + 1
        return [zlib.crc32(seen[:stop].tobytes()) for stop in ends.tolist()]

    def _sums(self, request: ScoreRequest, item: int) -> list[float]:
        """Return the labels' log-probabilities after each scored token, plus its log-sum-exp."""
        assert request.trie is not None
        sums = []
        places = [-1] if request.readouts is None else request.readouts.places[1 + item].tolist()
        prompt, states = self._prompt(request, item), self.states_of(request, item)
        pairs = [(row, label) for row in range(len(places)) for label in request.trie.sequences]
        for row, label in pairs:
            stop = len(request.query_ids) + places[row] + 1 if places[row] >= 0 else None
            tokens, total = prompt[:stop], float(hashed(states[row], LSE))
            for token in label:
                state = zlib.crc32(triples(int(request.salt), 0, tokens).tobytes())
                assert state not in self.backend.poison
                total += min(float(hashed(state, token)) - float(hashed(state, LSE)), 0.0)
                tokens = np.append(tokens, np.int32(token))
            sums.append(float(np.float32(total)))
        return sums

    @staticmethod
    def _query_states(request: ScoreRequest) -> list[int]:
        seen = triples(int(request.salt), 0, request.query_ids)
        assert request.readouts is not None
        return [zlib.crc32(seen[: n + 1].tobytes()) for n in request.readouts.places[0]]

    def check_pages(self) -> None:
        assert self.runner.scheduler.pages.num_used == 0, "a page was lost"
        assert self.states.num_used == 0, "a state was lost"

    def result_of(self, ticket: Ticket) -> ScoreResult | None:
        """Return a request's result; None if it was cancelled or had an error that was due."""
        assert ticket.future.done(), "a request was lost"
        if ticket.future.cancelled():
            return None
        error = ticket.future.exception()
        if error is not None:
            assert self.is_due(error, ticket.request), f"{error!r} for no reason"
            return None
        return ticket.future.result()

    def check(self, ticket: Ticket) -> None:
        request, result = ticket.request, self.result_of(ticket)
        if result is None:
            return
        rows: list[int] = []
        first = len(request.row_labels) - len(request.item_ids)  # 1 if the query is scored
        for place, labels in enumerate(request.row_labels):
            states = (
                self.states_of(request, place - first)
                if place >= first
                else self._query_states(request)
            )
            assert not self.backend.poison & {*states}
            rows += states
            counts = [len(labels)]
            if request.readouts is not None:
                counts = request.readouts.counts[place + 1 - first]
            of_labels = np.repeat(states, counts).tolist()
            expected = [
                hashed(state, int(label)) for state, label in zip(of_labels, labels, strict=True)
            ]
            if request.trie is not None:
                expected = self._sums(request, place)
            assert result.label_logits[place].tolist() == expected, "a wrong score"
        for asked, values, kind in (
            (request.need_lse, result.lse, LSE),
            (request.num_top, result.top_ids, TOP_ID),
            (request.num_top, result.top_logits, TOP_LOGIT),
        ):
            assert (values is not None) == bool(asked)
            if values is not None:
                kinds = [kind - 2 * rank for rank in range(int(asked))]
                expected = [[hashed(state, kind) for kind in kinds] for state in rows]
                assert values.reshape(len(rows), -1).tolist() == expected, kind
        assert result.computed_tokens > 0

    def is_due(self, error: BaseException, request: ScoreRequest) -> bool:
        reasons: dict[type, Callable[[], bool]] = {
            InternalError: lambda: "crash" in self.backend.seen_faults,
            InsufficientMemory: lambda: bool({"memory", "launch"} & self.backend.seen_faults),
            NonfiniteScore: lambda: bool({"nan", "poison"} & self.backend.seen_faults),
            DeadlineExceeded: lambda: request.deadline is not None and request.deadline <= self.now,
            Unavailable: lambda: True,
        }
        return type(error) in reasons and reasons[type(error)]()


FAULTS = {
    "launch": 0.03,
    "memory": 0.06,
    "crash": 0.02,
    "nan": 0.03,
    "poison": 0.05,
    "pages": 0.1,
    "slow": 0.05,
}


def simulate(seed: int, num_states: int = 0) -> World:
    """Run the seed's world: a third of the worlds have no faults, a third one kind, a third all
    kinds. With `num_states` its backend has so many slots for states."""
    kinds = sorted(FAULTS)
    chosen = [[], [kinds[seed // 3 % len(kinds)]], kinds][seed % 3]
    return World(seed, {kind: FAULTS[kind] for kind in chosen}, num_states).run()
