"""Promise: a score does not depend on what else happens: cold, warm, chunked, packed, alone or
beside other requests.

Random requests with shared beginnings are in flight together over a small pool of pages, and some
are cancelled. Every answer is compared with transformers on each prompt alone, and with
`--deterministic` bit for bit with an engine that scores nothing else.
"""

import threading
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from msgspec import structs

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.types.request import ScoreRequest
from support.models import random_ids, reference_logprobs
from support.slow import slow

LABELS = np.array([3, 17, 399], np.int32)


def make_engine(directory, **options):
    """Return an engine with room for little more than the longest prompt: requests wait, pages are
    evicted."""
    config = ModelConfig(
        str(directory), dtype="float32", compile="off", max_model_len=512, **options
    )
    pages = plan_backend(directory, config).pages
    config = replace(config, kv_cache_size=pages.needed * 3 // 2 * pages.page_bytes)
    return Engine(create_backend(plan_backend(directory, config)))


def some_requests(rng, count, fixed_cut):
    """Yield requests whose queries share beginnings, with items from 1 token to more than a
    batch."""
    stems = [random_ids(rng, n) for n in (150, 290)]
    for _ in range(count):
        stem = stems[rng.integers(2)]
        query = stem[: int(rng.integers(0, len(stem) + 1))] + random_ids(rng, int(rng.integers(30)))
        longest = int(rng.choice([2, 20, 190]))
        items = [random_ids(rng, int(n)) for n in rng.integers(1, longest, int(rng.integers(1, 7)))]
        if fixed_cut and query:  # cut where a builder would, by the query alone
            items, query = [query[-1:] + item for item in items], query[:-1]
        yield ScoreRequest(
            np.array(query, np.int32),
            tuple(np.array(item, np.int32) for item in items),
            (LABELS,) * len(items),
            need_lse=True,
            priority=int(rng.integers(2)),
            salt=str(rng.integers(2)),
        )


def prompts_of(request):
    return [request.query_ids.tolist() + item.tolist() for item in request.item_ids]


def rows_of(result):
    return np.column_stack((np.stack(result.label_logits), result.lse))


def in_flight_together(engine, rng, requests):
    """Submit requests from several threads and return their results, None for cancelled ones."""
    futures = [None] * len(requests)

    def submit(indices):
        for index in indices:
            futures[index] = engine.score(requests[index])

    parts = np.array_split(rng.permutation(len(requests)), 3)
    threads = [threading.Thread(target=submit, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in rng.choice(len(requests), 2, replace=False):
        futures[index].cancel()
    return [None if f.cancelled() else f.result(60) for f in futures]


def one_by_one(request):
    """Return a request for each item alone."""
    pairs = zip(request.item_ids, request.label_ids, strict=True)
    salts = (f"alone-{id(request)}-{number}" for number in count())
    return [
        structs.replace(request, item_ids=(item,), label_ids=(labels,), salt=salt)
        for (item, labels), salt in zip(pairs, salts, strict=False)
    ]


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_as_transformers_alone(tiny_model, seed):
    rng = np.random.default_rng(seed)
    directory, model = tiny_model("qwen3")
    engine = make_engine(directory, max_batch_tokens=int(rng.choice([33, 128, 700])))
    requests = [*some_requests(rng, 14, fixed_cut=False)]
    results = in_flight_together(engine, rng, requests)
    engine.close()
    for request, result in zip(requests, results, strict=True):
        if result is not None:
            expected = reference_logprobs(model, prompts_of(request))
            rows = rows_of(result)
            got = rows[:, :-1] - rows[:, -1:]
            np.testing.assert_allclose(got, expected[:, LABELS], atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", [1, *slow(0, 2)])
def test_bit_for_bit_with_deterministic(tiny_model, seed):
    rng = np.random.default_rng(seed)
    directory, _ = tiny_model(("qwen3", "gemma3")[seed % 2])
    budget = int(rng.choice([128, 200, 700]))
    engine = make_engine(directory, deterministic=True, max_batch_tokens=budget)
    lonely = make_engine(directory, deterministic=True, max_batch_tokens=700)
    requests = [*some_requests(rng, 14, fixed_cut=True)]
    results = in_flight_together(engine, rng, requests)
    for request, result in zip(requests, results, strict=True):
        if result is None:
            continue
        for got, alone in zip(rows_of(result), one_by_one(request), strict=True):
            (expected,) = rows_of(lonely.score(alone).result(60))
            np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))
    engine.close()
    lonely.close()
