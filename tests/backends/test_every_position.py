"""Promise: the log-probability of every token of a prompt equals transformers', in bounded
memory."""

import json
import sys
from itertools import accumulate

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.dialects.completion_answer import position_logprobs
from gpuscore.engine.engine import Engine
from gpuscore.types.request import ScoreRequest
from support.backends import needs_jax
from support.batches import every_token
from support.models import random_ids
from support.programs import run_module

LENGTHS = (1, 2, 63, 111, 130, 257, 33, 300)


def request_of(prompts, cut=0):
    arrays = tuple(np.array(prompt, np.int32) for prompt in prompts)
    labels = tuple(np.roll(array, -1) for array in arrays)
    items = tuple(array[cut:] for array in arrays)
    return ScoreRequest(
        arrays[0][:cut],
        items,
        tuple(ids[cut:] for ids in labels),
        need_lse=True,
        num_top=1,
        readouts=every_token(items, labels[0][:cut]),
    )


def rows_of(result, prompts, cut):
    """Return label logits, log-sum-exp and best logit of each row of each prompt, [rows, 3]."""
    rows = np.column_stack(
        (np.concatenate(result.label_logits), result.lse, result.top_logits[:, 0])
    )
    ends = np.cumsum([cut, *(len(prompt) - cut for prompt in prompts)])
    first, *others = np.split(rows, ends[:-1])
    return [np.concatenate((first, item)) for item in others]


@pytest.fixture
def engine(tiny_model):
    made = []

    def make(family, **options):
        directory, _ = tiny_model(family, max_position_embeddings=1024)
        compiled = {} if options.get("backend") == "jax" else {"compile": "off"}
        config = ModelConfig(str(directory), dtype="float32", **compiled | options)
        made.append(Engine(create_backend(plan_backend(directory, config))))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def split(values):
    ends = [*accumulate(LENGTHS)]
    return [values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_as_transformers_in_chunks_packed_and_alone(engine, tiny_model, family):
    """Gemma 2 has windows and soft caps."""
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, n) for n in LENGTHS]
    request = request_of(prompts)
    _, model = tiny_model(family, max_position_embeddings=1024)
    for max_batch_tokens in (49, 700):
        made = engine(family, max_batch_tokens=max_batch_tokens)
        positions = position_logprobs(made.score(request).result(60), request.label_ids)
        for prompt, label, best, best_ids in zip(
            prompts,
            *map(split, (positions.label, positions.top[:, 0], positions.top_ids[:, 0])),
            strict=True,
        ):
            with torch.no_grad():
                logits = model(torch.tensor([prompt])).logits[0]
            expected = torch.log_softmax(logits.double(), -1).numpy()
            following = expected[np.arange(len(prompt)), np.roll(prompt, -1)]
            np.testing.assert_allclose(label, following, atol=1e-4, rtol=0)
            np.testing.assert_allclose(best, expected.max(axis=1), atol=1e-4, rtol=0)
            np.testing.assert_array_equal(best_ids, expected.argmax(axis=1))
            np.testing.assert_array_equal(label == best, np.roll(prompt, -1) == best_ids)


CONTEXT, CHOICES = 139, (1, 9, 2, 67, 33)


def choices_of(seed, context=CONTEXT, choices=CHOICES):
    rng = np.random.default_rng(seed)
    start = random_ids(rng, context)
    return [start + random_ids(rng, n) for n in choices]


@pytest.mark.parametrize(
    ("backend", "family", "max_batch_tokens"),
    [
        *(("torch", "qwen3", 49), ("torch", "gemma2", 256)),
        pytest.param("jax", "qwen3", 49, marks=needs_jax),
    ],
)
def test_choices_of_one_context_share_its_rows(
    engine, tiny_model, backend, family, max_batch_tokens
):
    """Choices come together and one by one, cold and cached, in odd chunks, and as a tree of
    items."""
    made = engine(family, backend=backend, max_batch_tokens=max_batch_tokens)
    prompts = choices_of(0)
    _, model = tiny_model(family, max_position_embeddings=1024)
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            logits = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1).numpy()
        expected.append((logits[np.arange(len(prompt)), np.roll(prompt, -1)], logits.max(axis=1)))
    cut, total = CONTEXT - 1, sum(map(len, prompts))
    pages = cut // made.limits.page_size * made.limits.page_size
    cold = CONTEXT - 1 + sum(n + 1 for n in CHOICES)
    if max_batch_tokens < max(CHOICES):  # that item computes the query's last, half page again
        cold += cut - pages
    asked = [
        (prompts, cut, "a", cold),
        (prompts, cut, "a", cold - pages),
        *(([prompt], len(prompt) - 1, "a", len(prompt) - pages) for prompt in prompts),
        *(([prompt], len(prompt) - 1, "b", None) for prompt in prompts),
        (prompts, cut, "b", cold - pages),
        (prompts, 0, "a", cold if max_batch_tokens > total else None),
    ]
    for some, at, salt, tokens in asked:
        result = made.score(replace(request_of(some, at), salt=salt)).result(60)
        if tokens is not None:
            assert result.computed_tokens == tokens
        for prompt, rows in zip(some, rows_of(result, some, at), strict=True):
            label, best = expected[prompts.index(prompt)]
            np.testing.assert_allclose(rows[:, 0] - rows[:, 1], label, atol=1e-4, rtol=0)
            np.testing.assert_allclose(rows[:, 2] - rows[:, 1], best, atol=1e-4, rtol=0)


def test_deterministic_choices(engine):
    """The bits are the same as of each prompt alone and uncut, with and without cached rows."""
    prompts, cut = choices_of(1, 293, (1, 9, 2, 130, 33)), 256
    how = {"deterministic": True, "compile": "on"}
    whole = engine("qwen3", **how, max_batch_tokens=1000)
    chunked = engine("qwen3", **how, max_batch_tokens=150)
    alone = [rows_of(whole.score(request_of([p])).result(60), [p], 0)[0] for p in prompts]
    for made in (whole, chunked):
        for some, at in ((prompts, 0), (prompts, cut), (prompts, cut), (prompts[3:4], 384)):
            result = made.score(request_of(some, at)).result(60)
            for prompt, rows in zip(some, rows_of(result, some, at), strict=True):
                bits = alone[prompts.index(prompt)].view(np.int32)
                np.testing.assert_array_equal(rows.view(np.int32), bits)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_is_not_tokens_times_vocabulary(tiny_model):
    """Score 1,000 tokens at once, whose logits would take 160 MB."""
    tokens, vocab = 1000, 40_000
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    directory, _ = tiny_model("qwen3", vocab_size=vocab, max_position_embeddings=4096, **sizes)
    done = run_module("support.position_memory", directory, tokens, vocab)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert grown is not None
    assert grown < 100 * 2**20, f"{grown / 2**20:.0f} MiB"
