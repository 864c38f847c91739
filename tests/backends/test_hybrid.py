"""Promise: models with linear layers score as transformers does, within 1e-4 in float32, in chunks
of any size, cold and from cached states; what they do not support is refused by name."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5ForSequenceClassification,
)

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.commands.cli import main
from gpuscore.config import ModelConfig
from gpuscore.dialects.completion_answer import position_logprobs
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError
from support.connections import connected, score
from support.models import (
    COMMON,
    HYBRID,
    make_tokenizer,
    random_ids,
    random_weights,
    reference_logits,
    reference_logprobs,
)
from support.quantized import quantised
from support.serving import serving, wait_until
from support.slow import slow

from .test_every_position import request_of

TOLERANCE = 1e-4
LABELS = [3, 17, 399]
OPTIONS = {"label_token_ids": LABELS, "logprobs": True}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def check(model, result, prompts):
    expected = reference_logprobs(model, prompts)
    assert expected.std() > 1, "near-uniform outputs would prove nothing"
    np.testing.assert_allclose(result.logprobs, expected[:, LABELS], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("max_batch_tokens", [1, 64, *slow(2, 3, 63, 65, 128)])
def test_chunks(tiny_model, rng, max_batch_tokens):
    """A query over several batches and items longer than a batch, whose states chunks hand on."""
    directory, model = tiny_model("qwen3_5")
    query = random_ids(rng, 20 if max_batch_tokens == 1 else 150)
    items = [random_ids(rng, n) for n in (1, 64, 2, 130, 63)]
    if max_batch_tokens == 1:
        items = [item[:5] for item in items]
    with Scorer(str(directory), max_batch_tokens=max_batch_tokens) as scorer:
        for some in (items, items[:1]):
            result = scorer.score(query, some, **OPTIONS)
            check(model, result, [query + item for item in some])
        check(model, scorer.score([], items, **OPTIONS), items)


def together(scorer, requests):
    """Score requests that are in the engine at a time."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return [*pool.map(lambda request: scorer.score(*request, **OPTIONS), requests)]


def test_120_items_with_shared_heads_beside_other_requests(tiny_model, rng):
    directory, model = tiny_model("qwen3_5")
    query, head = random_ids(rng, 90), random_ids(rng, 30)
    items = [head + random_ids(rng, int(n)) for n in rng.integers(1, 24, 60)]
    items += [random_ids(rng, int(n)) for n in rng.integers(1, 24, 60)]
    others = [(random_ids(rng, n), [random_ids(rng, 4), []]) for n in (1, 17, 50, 200)]
    with Scorer(str(directory), max_batch_tokens=256) as scorer:
        results = together(scorer, [(query, items), *others])
    for (prompt, some), result in zip([(query, items), *others], results, strict=True):
        check(model, result, [prompt + item for item in some])


@pytest.mark.parametrize("length", [15, 16, 31, 33, 80])
def test_a_hit_at_every_boundary(tiny_model, rng, length):
    """The state after the query's last full page of 16 is cached; a query that goes on from there,
    and items longer than a batch, begin with it."""
    directory, model = tiny_model("qwen3_5")
    query, items = random_ids(rng, length), [random_ids(rng, n) for n in (3, 1)]
    long_item = random_ids(rng, 100)
    longer = query + random_ids(rng, 40)
    whole = length // 16 * 16
    with Scorer(str(directory), max_batch_tokens=48) as scorer:
        cold = scorer.score(query, items, **OPTIONS)
        check(model, cold, [query + item for item in items])
        assert cold.cached_tokens == length, "once for two items"
        for prompt in (query, longer, query[:-1], query):
            hit = scorer.score(prompt, items, **OPTIONS)
            check(model, hit, [prompt + item for item in items])
            cached = hit.cached_tokens - len(prompt)
            assert cached == (whole if len(prompt) >= length or length % 16 else 0)
            long = scorer.score(prompt, [*items, long_item], **OPTIONS)
            check(model, long, [prompt + item for item in [*items, long_item]])


def test_a_long_query_keeps_states_in_between(tiny_model, rng):
    """Another query that shares 1,100 tokens begins with the state after 1,024 of them."""
    directory, model = tiny_model("qwen3_5", max_position_embeddings=4096)
    query, item = random_ids(rng, 1400), random_ids(rng, 5)
    other = query[:1100] + random_ids(rng, 60)
    with Scorer(str(directory), max_batch_tokens=300) as scorer:
        check(model, scorer.score(query, [item], **OPTIONS), [query + item])
        hit = scorer.score(other, [item], **OPTIONS)
        assert hit.cached_tokens == 1024
        check(model, hit, [other + item])


@pytest.mark.parametrize("max_batch_tokens", [49, 700])
def test_every_position(tiny_model, max_batch_tokens):
    directory, model = tiny_model("qwen3_5", max_position_embeddings=1024)
    rng, lengths = np.random.default_rng(0), (1, 2, 63, 130, 195)
    prompts = [random_ids(rng, n) for n in lengths]
    config = ModelConfig(str(directory), max_batch_tokens=max_batch_tokens)
    engine = Engine(create_backend(plan_backend(directory, config)))
    request = request_of(prompts)
    positions = position_logprobs(engine.score(request).result(60), request.label_ids)
    engine.close()
    ends = [*accumulate(lengths)]
    for prompt, start, stop in zip(prompts, [0, *ends], ends, strict=False):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        expected = torch.log_softmax(logits.double(), -1).numpy()
        following = expected[np.arange(len(prompt)), np.roll(prompt, -1)]
        np.testing.assert_allclose(positions.label[start:stop], following, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(positions.top_ids[:, 0][start:stop], expected.argmax(axis=1))


def test_a_linear_layer_is_the_last(tiny_model, rng):
    kinds = ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"]
    directory, model = tiny_model("qwen3_5", layer_types=kinds)
    query, items = random_ids(rng, 70), [random_ids(rng, n) for n in (1, 20, 41)]
    with Scorer(str(directory), max_batch_tokens=64) as scorer:
        for _ in range(2):
            result = scorer.score(query, items, **OPTIONS)
            check(model, result, [query + item for item in items])


def test_over_http(tiny_model, rng):
    """Ids and texts, cold and cached."""
    directory, model = tiny_model("qwen3_5")
    tokenizer = make_tokenizer(bos=False)
    text, texts = "query: a blue wooden chair for the gar", ["den", "", " item: The chair"]
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (1, 20, 3)]
    asked = [(query, items, [query + item for item in items])] * 2
    asked.append((text, texts, [tokenizer.encode(text + item).ids for item in texts]))
    more = {"label_token_ids": LABELS, "return_label_logprobs": True}
    with serving(directory, "--threads", "1") as server, connected(server) as client:
        for before, some, prompts in asked:
            reply = score(client, query=before, items=some, **more)
            assert reply.status_code == 200, reply.text
            expected = reference_logprobs(model, prompts)[:, LABELS]
            got = reply.json()["label_logprobs"]
            np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)
        cached = [
            score(client, query=query, items=items[:1], **more, cache_salt=salt).json()["usage"]
            for salt in ("a", "b", "a")
        ]
        counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached]
        assert counts == [0, 0, 32], "states are found by the caller's own digests"
        assert client.get("/info").json()["gpuscore"]["states"] == 64
        kept = re.compile(r'gpuscore_state_slots\{.*state="cached"\} 3.0')
        wait_until(lambda: kept.search(client.get("/metrics").text) is not None)
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))


# ---- checkpoints of text and pictures ----

PICTURES = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 48, "num_position_embeddings": 16},
}


@pytest.fixture
def of_pictures(tmp_path):
    """of_pictures(model class) -> (directory, transformers model) with a tower of pictures."""

    def make(model_class, **fields):
        torch.manual_seed(0)
        config = Qwen3_5Config(text_config=COMMON | HYBRID, vision_config=PICTURES, **fields)
        model = model_class(config).float().eval()
        random_weights(model, "qwen3_5")
        model.save_pretrained(tmp_path)
        weights = tmp_path / "model.safetensors"
        tensors = load_file(weights)
        assert any(name.startswith("model.visual.") for name in tensors)
        save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, weights)  # as the hub's files have
        return tmp_path, model

    return make


def test_the_text_of_a_model_of_text_and_pictures(of_pictures, rng):
    directory, model = of_pictures(Qwen3_5ForConditionalGeneration)
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (3, 1, 70)]
    with Scorer(str(directory), max_batch_tokens=64) as scorer:
        check(model, scorer.score(query, items, **OPTIONS), [query + item for item in items])


def test_a_classifier_of_text_and_pictures(of_pictures, rng):
    names = {"id2label": {0: "good", 1: "not good", 2: "no idea"}}
    directory, model = of_pictures(Qwen3_5ForSequenceClassification, **names)
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (3, 1, 20)]
    with Scorer(str(directory), max_batch_tokens=64) as scorer:
        result = scorer.score(query, items, label_token_ids=[2, 0, 1], logits=True)
    expected = reference_logits(model, [query + item for item in items])
    np.testing.assert_allclose(result.logits, expected[:, [2, 0, 1]], atol=TOLERANCE, rtol=0)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "not supported with --deterministic"),
        ({"tensor_parallel": 2}, "--tensor-parallel is 2; supported: 1"),
        ({"attention": "flashinfer"}, "--attention is flashinfer; supported: torch, triton"),
        ({"backend": "jax"}, "'Qwen3_5ForCausalLM', which --backend jax does not compute"),
    ],
)
def test_settings_that_are_refused(tiny_model, options, message):
    directory, _ = tiny_model("qwen3_5")
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, ModelConfig(str(directory), device="cpu", **options))


def test_quantised_checkpoints_are_refused(tiny_model, tmp_path):
    made = quantised(tiny_model("qwen3_5")[0], tmp_path / "made")
    config = ModelConfig(device="cpu", quantization="w8a16")
    with pytest.raises(ConfigError, match="products are in w8a16; supported: weights that are"):
        plan_backend(made, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "supported: 5 entries"),
        ({"layer_types": ["linear_attention"] * 5}, "at least one full_attention"),
        ({"layer_types": None, "full_attention_interval": 6}, "at least one full_attention"),
        ({"layer_types": ["sliding_attention"] * 5}, "each full_attention or linear_attention"),
        ({"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 at least 2"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"partial_rotary_factor": 2, "rope_parameters": None}, "which rotates 32 of 16"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            "rope_type 'yarn' is not supported for Qwen3_5",
        ),
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "shared expert"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "shared expert"),
    ],
)
def test_files_that_are_refused(tiny_model, tmp_path, fields, message):
    directory, _ = tiny_model("qwen3_5")
    config = json.loads((directory / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        plan_backend(tmp_path, ModelConfig(str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"vocab_size": 7}, "vocab_size is 7, but 400 in text_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and False in text_config"),
        ({"something_new": 1}, "something_new"),
        ({"text_config": 3}, "text_config must be a JSON object"),
    ],
)
def test_files_of_text_and_pictures_that_are_refused(of_pictures, beside, message):
    directory, _ = of_pictures(Qwen3_5ForConditionalGeneration)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | beside))
    with pytest.raises(ConfigError, match=message):
        plan_backend(directory, ModelConfig(str(directory), device="cpu"))


def test_info_plans_states_here_and_on_a_card(tiny_model, capsys):
    directory, _ = tiny_model("qwen3_5")
    assert main(["info", str(directory), "--device", "cpu"]) == 0
    here = capsys.readouterr().out
    # Three linear layers: 6 matrices of 12 x 20 in float32, 3 inputs of 168 columns in float32.
    size = 64 * 3 * (6 * 12 * 20 * 4 + 3 * 168 * 4)
    assert f"{size / 2**20:.1f} MiB (64 slots)" in here
    assert re.search(r"layers of linear attention +3", here)
    assert main(["info", str(directory), "--device-memory", "8GiB"]) == 0
    on_a_card = capsys.readouterr().out
    assert "(64 slots)" in on_a_card
    assert re.search(r"attention +auto -> triton", on_a_card)
