"""Promise: repeated queries stay where their prefix is cached, until a batch of other work waits
there."""

from collections import Counter

import numpy as np
import pytest
from msgspec import structs

from gpuscore.processes.replicas.router import HOME_TOKENS, choose
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


def loads_of(*tokens):
    return dict(enumerate(tokens))


@pytest.fixture
def rng():
    return np.random.default_rng()


def homes(requests, loads):
    return [choose(request, loads, LIMITS) for request in requests]


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
    after = homes(requests, {number: 0 for number in idle if number != 2})
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


def test_a_home_with_less_than_a_batch_keeps_its_queries(rng):
    request = request_of(rng)
    home = choose(request, loads_of(0, 0, 0), LIMITS)
    loads = {number: 999 if number == home else 0 for number in range(3)}
    assert choose(request, loads, LIMITS) == home


def test_a_busy_home_gives_its_query_to_the_least_loaded_if_that_is_worth_the_query(rng):
    request = request_of(rng, query=640)
    home = choose(request, loads_of(0, 0, 0), LIMITS)
    near, far = (number for number in range(3) if number != home)
    busy = {home: 1600, near: 1000, far: 961}
    assert choose(request, busy, LIMITS) == home, "to compute 640 tokens again takes longer"
    assert choose(request, busy | {far: 959}, LIMITS) == far


def test_a_query_without_a_full_page_goes_to_the_least_loaded(rng):
    requests = [request_of(rng, query=15) for _ in range(20)]
    assert set(homes(requests, loads_of(5, 3, 4))) == {1}
