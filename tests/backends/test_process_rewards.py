"""Promise: a process reward model scores each step of an answer as its model card's code does, and
other heads over classes are read at any token."""

import json
import shlex
import shutil

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.common.shapes import count_parameters
from gpuscore.commands.cli import main
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.prompts.registry import STEP_TOKEN
from support.backends import needs_jax
from support.models import TOKENS, random_ids
from support.serving import QUICK, serving

TYPE = "application/json"

# The prompt of the card of Qwen2.5-Math-PRM, whose template is ChatML.
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
QUERY = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHow many flamingos are there?"
    "<|im_end|>\n<|im_start|>assistant\n"
)
ANSWERS = [
    ["First, 18 were there.", " Then 6 left: 12.", " So it is \\boxed{12}."],
    ["It is 7."],
    ["First, 18 were there.", " Then one came."],
]


@pytest.fixture(scope="module")
def prm(tiny_model, tmp_path_factory):
    """A model with its step token, and the head of the language model that it was made from."""
    directory, model = tiny_model("qwen2_prm")
    made = tmp_path_factory.mktemp("prm") / "model"
    shutil.copytree(directory, made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens([STEP_TOKEN])
    tokenizer.save(str(made / "tokenizer.json"))
    tensors = load_file(made / "model.safetensors")
    head = {"lm_head.weight": torch.ones(tensors["model.embed_tokens.weight"].shape)}
    save_file(tensors | head, made / "model.safetensors")
    return made, model, tokenizer


def card_rewards(prm, text):
    """Return the rewards as the card's code has them: softmax[..., 1] at each step token."""
    _, model, tokenizer = prm
    ids = tokenizer.encode(text).ids
    with torch.no_grad():
        shares = torch.softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)[:, 1]
    return shares[torch.tensor(ids) == tokenizer.token_to_id(STEP_TOKEN)].numpy()


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=needs_jax)])
def test_rewards_of_steps(prm, backend):
    """Without any field of the request: the family is known by the architecture."""
    items = [f"{STEP_TOKEN.join(steps)}{STEP_TOKEN}<|im_end|>\n" for steps in ANSWERS]
    with Scorer(str(prm[0]), backend=backend, dtype="float32", max_batch_tokens=64) as scorer:
        got = scorer.score(QUERY, items, label_token_ids=[0, 1])
        with pytest.raises(InvalidRequest, match="token 0 of the query is the extraction token"):
            scorer.score(STEP_TOKEN + QUERY, items, label_token_ids=[1])
    assert np.diff(got.offsets).tolist() == [3, 1, 2]
    for rows, item in zip(np.split(got.scores, got.offsets[1:-1]), items, strict=True):
        expected = card_rewards(prm, QUERY + item)
        np.testing.assert_allclose(rows[:, 1], expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-6)
    assert got.scores[:, 1].std() > 0.1


def test_over_http(prm, capfd):
    """A body needs no label and no token; the request to try that is printed works."""
    items = [f"{STEP_TOKEN.join(steps)}{STEP_TOKEN}" for steps in ANSWERS]
    with serving(str(prm[0]), *QUICK) as running:
        told = httpx.post(f"{running.url}/v1/score", json={"query": QUERY, "items": items}).json()
        shown = next(line for line in running.process.stdout if "curl" in line)
        words = shlex.split(shown)
        tried = httpx.post(words[2], content=words[-1], headers={"Content-Type": TYPE})
    for rows, item in zip(told["scores"], items, strict=True):
        expected = card_rewards(prm, QUERY + item)
        np.testing.assert_allclose([row[1] for row in rows], expected, atol=1e-4, rtol=0)
    assert len(tried.json()["scores"][0]) == 2, tried.text
    capfd.readouterr()
    assert main(["info", str(prm[0])]) == 0
    assert f"{STEP_TOKEN}, {prm[2].token_to_id(STEP_TOKEN)}" in capfd.readouterr().out


def test_the_family_can_be_named(prm, tiny_model):
    options = {"label_token_ids": [0, 1], "on_error": "null"}
    with Scorer(str(prm[0]), family="none", compile="off") as scorer:
        assert scorer.score("a", ["b"], **options).offsets is None, "read at the last token"
    with Scorer(str(prm[0]), family="prm", compile="off") as scorer:
        assert scorer.score("a", ["b"], **options).errors[0].code == "no_extraction_token"
    with pytest.raises(ConfigError, match=f"{STEP_TOKEN} is [0-9]+ tokens of the model's"):
        Scorer(str(tiny_model("qwen3_tokens")[0]), family="prm")


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=needs_jax)])
def test_a_head_without_a_bias(tiny_model, backend):
    directory, model = tiny_model("qwen3_tokens", token_classification_bias=False)
    assert model.score.bias is None
    check_last_tokens(directory, model, backend)


@pytest.mark.parametrize("family", sorted(TOKENS))
def test_each_architecture(tiny_model, family):
    directory, model = tiny_model(family)
    check_last_tokens(directory, model, "torch")
    config = plan_backend(directory, ModelConfig()).architecture.config
    assert count_parameters(config) == model.num_parameters()


def check_last_tokens(directory, model, backend):
    rng = np.random.default_rng(1)
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (1, 30)]
    labels = list(range(2 if "prm" in directory.name else 3))
    how = {"dtype": "float32", "family": "none", "max_batch_tokens": 64}
    with Scorer(str(directory), backend=backend, **how) as scorer:
        got = scorer.score(query, items, label_token_ids=labels, logits=True, logprobs=True)
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([query + i])).logits[0, -1] for i in items])
    np.testing.assert_allclose(got.logits, expected.numpy(), atol=1e-4, rtol=0)
    logprobs = torch.log_softmax(expected.double(), -1).numpy()
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4, rtol=0)


def test_bits_do_not_depend_on_other_items(prm):
    items = [f"{STEP_TOKEN.join(steps)}{STEP_TOKEN}" for steps in ANSWERS]
    options = {"label_token_ids": [0, 1], "logprobs": True}
    with Scorer(str(prm[0]), deterministic=True, compile="off", max_batch_tokens=512) as scorer:
        together = scorer.score(QUERY, items, **options)
        for rows, item in zip(
            np.split(together.logprobs, together.offsets[1:-1]), items, strict=True
        ):
            np.testing.assert_array_equal(scorer.score(QUERY, [item], **options).logprobs, rows)


@pytest.mark.parametrize(
    ("lost", "message"),
    [("score.2.bias", "no tensor score.2.bias"), ("score.0.weight", "no tensor score.0.weight")],
)
def test_a_head_that_lacks_a_part(prm, tmp_path, lost, message):
    directory = tmp_path / "copy"
    shutil.copytree(prm[0], directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors[lost]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        create_backend(plan_backend(directory, ModelConfig()))
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForProcessRewardModel"]
