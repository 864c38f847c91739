"""Promise: repeated queries stay where their prefix is cached, until the load there is not worth
it; and a long item list ends at the same time everywhere."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from gpuscore.processes.replicas.router import (
    AGAIN,
    BUSY_SHARE,
    HOME_TOKENS,
    InFlight,
    Load,
    Router,
)
from gpuscore.processes.worker.link import Report
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest

LIMITS = BackendLimits(
    max_tokens=1000, page_size=16, num_pages=100, max_model_len=4096, vocab_rows=99
)
LABEL = np.array([1], np.int32)


def request_of(rng, query=64, items=1, length=20, salt=""):
    rows = tuple(rng.integers(0, 99, length).astype(np.int32) for _ in range(items))
    start = rng.integers(0, 99, query).astype(np.int32)
    return ScoreRequest(start, rows, (LABEL,) * items, need_lse=False, salt=salt)


def loads_of(*tokens, rate=1000.0):
    return [Load(number, amount, rate) for number, amount in enumerate(tokens)]


@pytest.fixture
def rng():
    return np.random.default_rng()


def homes(requests, loads):
    return [Router(LIMITS).choose(request, loads).replica for request in requests]


def test_a_query_has_one_home_for_every_router(rng):
    requests = [request_of(rng) for _ in range(200)]
    same_queries = [structs.replace(r, item_ids=request_of(rng).item_ids) for r in requests]
    idle = loads_of(*[0] * 8)
    assert homes(requests, idle) == homes(same_queries, idle)
    counts = Counter(homes(requests, idle))
    assert len(counts) == 8, counts
    assert max(counts.values()) < 60, counts


def test_only_the_queries_of_a_lost_replica_move(rng):
    requests = [request_of(rng) for _ in range(200)]
    idle = loads_of(*[0] * 5)
    before = homes(requests, idle)
    after = homes(requests, [load for load in idle if load.replica != 2])
    assert all(b == a for b, a in zip(before, after, strict=True) if b != 2)
    assert {a for b, a in zip(before, after, strict=True) if b == 2} == {0, 1, 3, 4}


def test_the_salt_and_the_first_tokens_decide(rng):
    idle = loads_of(*[0] * 64)
    short = request_of(rng, query=HOME_TOKENS + 100)
    longer = structs.replace(short, query_ids=np.concatenate([short.query_ids, short.query_ids]))
    assert homes([short], idle) == homes([longer], idle), "a history that grows stays"
    salted = [structs.replace(short, salt=str(n)) for n in range(20)]
    assert len(set(homes(salted, idle))) > 5
    other = structs.replace(short, query_ids=short.query_ids[::-1].copy())
    tail = structs.replace(short, query_ids=short.query_ids.copy())
    tail.query_ids[-1] += 1  # in a part of a page, which is not cached
    assert homes([tail], idle) == homes([short], idle)
    assert len(set(homes([other, *salted], idle))) > 5


def test_a_request_leaves_home_when_the_wait_is_not_worth_its_prefix(rng):
    request = request_of(rng, query=1600 + 15)
    idle = loads_of(0, 0)
    (home,) = homes([request], idle)

    def chosen(tokens, *sent, rate=1000.0):
        router = Router(LIMITS)
        for replica in sent:
            router.sent(request, replica)
        loads = [Load(n, tokens if n == home else 0, rate) for n in range(2)]
        return router.choose(request, loads).replica

    assert chosen(AGAIN * 1600, home) == home
    assert chosen(AGAIN * 1600 + 1, home) == 1 - home
    assert chosen(AGAIN * 1600 + 1, home, rate=10.0) == 1 - home, "the rule holds at any rate"
    assert chosen(1600, home, 1 - home) == 1 - home, "it is cached in both"
    assert chosen(1001) == 1 - home, "it is cached in neither"


def test_what_a_replica_will_compute(rng):
    router = Router(replace(LIMITS, num_pages=10))  # of 16 tokens
    first, second = request_of(rng, query=100, length=7), request_of(rng, query=70, length=9)
    assert router.sent(first, 0) == 107
    assert router.sent(first, 0) == 11, "six pages were sent there before"
    assert router.sent(first, 1) == 107
    assert router.sent(structs.replace(first, salt="other"), 1) == 107
    assert router.sent(second, 0) == 79
    assert router.sent(first, 0) == 11, "six and four pages fit in ten"
    assert router.sent(request_of(rng, query=16), 0) == 36
    assert router.sent(second, 0) == 79, "the oldest one made room"
    router.lost(0)
    assert router.sent(first, 0) == 107


def test_a_request_stays_if_it_runs_in_the_next_batch_at_home(rng):
    request = request_of(rng, query=16)
    idle = loads_of(0, 0)
    (home,) = homes([request], idle)
    for tokens, chosen in ((LIMITS.max_tokens - 1, home), (LIMITS.max_tokens, 1 - home)):
        loads = [replace(load, tokens=tokens if load.replica == home else 0) for load in idle]
        assert homes([request], loads) == [chosen]


def test_without_a_full_page_the_least_loaded_takes_it_and_equal_ones_in_turn(rng):
    router = Router(LIMITS)
    request = request_of(rng, query=15)
    assert router.choose(request, loads_of(5, 3, 4)).replica == 1
    turns = Counter(router.choose(request, loads_of(0, 0, 0)).replica for _ in range(30))
    assert set(turns.values()) == {10}
    cacheless = Router(LIMITS, prefix_cache=False)
    chosen = {cacheless.choose(request_of(rng), loads_of(9, 1)).replica for _ in range(20)}
    assert chosen == {1}


def test_a_faster_replica_has_a_shorter_wait(rng):
    loads = [Load(0, 5000, 1000.0), Load(1, 8000, 4000.0), Load(2, 100_000, 0.0)]
    assert Router(LIMITS).choose(request_of(rng, query=0), loads).replica == 1


def test_a_long_list_is_divided_to_one_end(rng):
    request = request_of(rng, query=320, items=1000, length=10)
    parts = Router(LIMITS).divide(request, loads_of(0, 900, 0, 90_000))
    sizes = {load.replica: size for load, size in parts}
    assert set(sizes) == {0, 1, 2}
    assert abs(sum(sizes.values()) - 10_000) <= 3
    ends = [load.tokens + 320 + size for load, size in parts]
    assert max(ends) - min(ends) <= 3


def test_short_lists_and_expensive_queries_are_not_divided(rng):
    def parts(query, items, *tokens):
        request = request_of(rng, query=query, items=items, length=10)
        return len(Router(LIMITS).divide(request, loads_of(*tokens)))

    assert parts(320, 199, 0, 0) == 1, "under two batches"
    assert parts(0, 1, 0, 0) == 1
    assert parts(320, 400, 0, 0) == 2
    assert parts(3000, 400, 0, 0) == 1, "each part would compute more query than items"
    busy = LIMITS.max_tokens
    assert parts(300, 400, busy, busy) == 1, "it would take time from other requests"
    assert parts(300, 2 * 300 * BUSY_SHARE // 10, busy, busy) == 2


def test_what_is_left_of_the_work_in_flight():
    work = InFlight()
    work.add(1000)
    assert work.left(Report(0, 0)) == 1000, "nothing was reported yet"
    assert work.left(Report(1, 700)) == 700
    work.add(50)
    assert work.left(Report(1, 700)) == 750, "sent since the report"
    assert work.left(Report(2, 400)) == 400, "the next report counts it too"
    work.remove(800)
    assert work.left(Report(2, 400)) == 250, "never more than is in flight"
