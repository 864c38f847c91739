"""Promise: with `--deterministic` a score has the same bits alone, packed, cached, chunked and
beside other requests."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch.layers import all_at_once
from gpuscore.config import ModelConfig, RequestLimits
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from support.models import random_ids
from support.slow import slow

LABELS = [3, 17, 399]
UNLIMITED = RequestLimits(max_items=10**6, max_labels=10**6, max_request_tokens=10**6)


class Scoring:
    """An engine with a model. `bits` returns all float32 numbers of a request's result."""

    def __init__(self, directory, **options):
        config = ModelConfig(str(directory), deterministic=True, **{"compile": "on"} | options)
        self.backend = create_backend(plan_backend(directory, config))
        self.engine = Engine(self.backend)
        self.builder = PromptBuilder(None, self.backend.limits, UNLIMITED)
        self.salts = 0

    def submit(self, query, items, salt=None) -> Future:
        """Queue a request; without a salt it finds nothing in the prefix cache."""
        if salt is None:
            self.salts += 1
            salt = f"only {self.salts}"
        score_input = ScoreInput(query, items, labels=None, label_token_ids=LABELS, need_lse=True)
        request = self.builder.build(score_input)
        return self.engine.score(structs.replace(request, salt=salt))

    def bits(self, query, items, salt=None):
        return bits_of(self.submit(query, items, salt))


def bits_of(future):
    result = future.result(60)
    rows = np.column_stack((np.stack(result.label_logits), result.lse))
    return rows.view(np.int32)


@pytest.fixture
def scoring(tiny_model):
    made = []

    def make(family="qwen3", overrides=None, **options):
        directory, _ = tiny_model(family, max_position_embeddings=1024, **(overrides or {}))
        made.append(Scoring(directory, **options))
        return made[-1]

    yield make
    for scoring in made:
        scoring.engine.close()


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def some_items(rng, count, longest=40):
    return [random_ids(rng, int(n)) for n in rng.integers(0, longest, count)]


OTHERS = ("gemma2", "gemma3", "llama", "mistral", "qwen3", "qwen3_moe")
FAMILIES = [
    *(("qwen3", "bfloat16", compiled) for compiled in ("on", "off")),
    ("qwen3", "float32", "on"),
    *slow(*((name, "float32", "on") for name in OTHERS if name != "qwen3")),
    *slow(*((name, "float32", "off") for name in OTHERS)),
    *slow(("qwen3", "float16", "on"), ("gemma3", "bfloat16", "on")),
]


@pytest.mark.parametrize(("family", "dtype", "compiled"), FAMILIES)
def test_same_bits_in_every_batch(scoring, rng, family, dtype, compiled):
    how = {"dtype": dtype, "compile": compiled}
    # Products that are 96 wide depend on the number of rows, unless they are computed in tiles.
    made = scoring(family, {"hidden_size": 96}, **how, max_batch_tokens=320, max_model_len=320)
    query, items = random_ids(rng, 157), [*some_items(rng, 7), random_ids(rng, 141)]
    alone = np.concatenate([made.bits(query, [item]) for item in items])
    assert len(np.unique(alone[:, 0])) == len(items)  # the items' scores differ

    order = rng.permutation(len(items))
    packed = made.bits(query, [items[i] for i in order])
    np.testing.assert_array_equal(packed, alone[order])

    cold = made.bits(query, items, salt="kept")
    before = made.engine.stats().counters.cached_tokens
    warm = made.bits(query, items, salt="kept")
    assert made.engine.stats().counters.cached_tokens > before
    np.testing.assert_array_equal(cold, alone)
    np.testing.assert_array_equal(warm, alone)

    others = [
        made.submit(random_ids(rng, int(n)), some_items(rng, 3)) for n in rng.integers(1, 200, 4)
    ]
    crowd = [made.submit(query, items, salt="kept"), *others, made.submit(query, items[3:5])]
    np.testing.assert_array_equal(bits_of(crowd[0]), alone)
    np.testing.assert_array_equal(bits_of(crowd[-1]), alone[3:5])


def test_another_query_with_the_same_beginning(scoring, rng):
    """The last block of the first query is shorter, so its cached pages must not be used."""
    made = scoring(dtype="float32", max_batch_tokens=320, max_model_len=320)
    start, items = random_ids(rng, 172), some_items(rng, 4)
    query = start + random_ids(rng, 70)
    expected = made.bits(query, items)
    made.bits(start, items, salt="shared")
    np.testing.assert_array_equal(made.bits(query, items, salt="shared"), expected)


def test_two_threads(scoring, rng):
    threads = torch.get_num_threads()
    try:
        made = scoring(
            dtype="float32", threads=2, max_batch_tokens=600, overrides={"hidden_size": 96}
        )
        query, items = random_ids(rng, 200), some_items(rng, 9)
        alone = np.concatenate([made.bits(query, [item]) for item in items])
        np.testing.assert_array_equal(made.bits(query, items), alone)
    finally:
        torch.set_num_threads(threads)


def test_threads_share_work_evenly(tiny_model):
    directory, _ = tiny_model("qwen3", hidden_size=1208)  # 128 x 1208 / 3 is no integer
    config = ModelConfig(str(directory), deterministic=True, threads=3)
    with pytest.raises(ConfigError, match="--threads 3 .* the next lower number that can is 2"):
        plan_backend(directory, config)
    assert plan_backend(directory, replace(config, threads=2)).threads == 2
    assert plan_backend(directory, replace(config, threads=3, deterministic=False)).threads == 3


def test_a_false_claim_is_refused(tiny_model, monkeypatch):
    """A start finds products that are computed over all rows at once, and is refused."""
    monkeypatch.setattr("gpuscore.backends.torch.backend.in_tiles", lambda size: all_at_once)
    directory, _ = tiny_model("qwen3", hidden_size=96)
    config = ModelConfig(str(directory), deterministic=True, dtype="float32", max_batch_tokens=512)
    backend = create_backend(plan_backend(directory, config))
    with pytest.raises(ConfigError, match="items depend on the batch"):
        Engine(backend)
    backend.close()


def test_batches_under_one_chunk_are_refused(tiny_model):
    directory, _ = tiny_model("qwen3")
    with pytest.raises(ConfigError, match="127 is too low: --deterministic needs 128"):
        plan_backend(directory, ModelConfig("x", deterministic=True, max_batch_tokens=127))


def test_a_pair_does_not_depend_on_the_queries_of_others(rng):
    words = ["blue", "red", "wooden", "chair", "lamp", "steel", "wool", "a", "for", "the"]

    def text(count):
        return " ".join(rng.choice(words, count))

    queries = [text(40), text(60), text(5)]
    pairs = [(query, text(count)) for query in queries for count in (3, 30, 80)]
    with Scorer("demo", deterministic=True, compile="on", max_batch_tokens=512) as scorer:
        together = scorer.score_pairs(pairs, raw_scores=True).scores
        alone = [scorer.score_pairs([pair], raw_scores=True).scores[0] for pair in pairs]
        same_query = scorer.score_pairs(pairs[:3], raw_scores=True).scores
    assert together.tolist() == alone
    assert same_query.tolist() == alone[:3]


def test_a_labels_bits_do_not_depend_on_the_other_labels(tiny_model):
    """Labels of several tokens change the form of a request, but not the bits of other labels."""
    directory, _ = tiny_model("qwen3", max_position_embeddings=1024)
    rng = np.random.default_rng(7)
    query, items = random_ids(rng, 150), [random_ids(rng, n) for n in (1, 7, 40)]
    bits_of: dict[tuple[int, ...], set[bytes]] = {}
    with Scorer(str(directory), dtype="float32", deterministic=True, compile="on") as scorer:
        for _ in range(12):
            longest = int(rng.integers(1, 4))
            labels = [random_ids(rng, int(n)) for n in rng.integers(1, longest + 1, 6)]
            labels += [[3], [17], [3, 5]][: 2 if longest == 1 else 3]
            result = scorer.score(query, items, label_sequences=labels, logprobs=True)
            for place, label in enumerate(labels):
                bits = result.logprobs[:, place].tobytes() + result.scores[:, place].tobytes()
                bits_of.setdefault(tuple(label), set()).add(bits)
    assert {len(bits) for bits in bits_of.values()} == {1}
