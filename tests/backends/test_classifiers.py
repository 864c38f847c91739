"""Promise: a classification head's logits are transformers', and its labels are its classes."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gpuscore import Scorer
from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.common.shapes import count_parameters
from gpuscore.commands.cli import main
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError, InvalidRequest, TokenIdOutOfRange
from support.backends import needs_jax
from support.models import CLASSIFIERS, VOCAB, random_ids, reference_logits
from support.slow import slow

TOLERANCE = 1e-4
NAMES = ["good", "not good", "no idea"]


def names(count):
    return {index: f"class {index}" for index in range(count)}


@pytest.fixture
def rng():
    return np.random.default_rng(2)


def check(model, prompts, result, labels):
    expected = reference_logits(model, prompts)
    assert len(expected) == 1 or expected.std() > 1, "near-uniform outputs would prove nothing"
    logprobs = expected - np.logaddexp.reduce(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(result.logits, expected[:, labels], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(result.logprobs, logprobs[:, labels], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(result.scores, np.exp(logprobs[:, labels]), atol=TOLERANCE, rtol=0)


# 24 tokens: less than the query and some items have; 512: everything in one batch.
@pytest.mark.parametrize("max_batch_tokens", [24, *slow(512)])
@pytest.mark.parametrize("family", sorted(CLASSIFIERS))
def test_as_transformers(tiny_model, rng, family, max_batch_tokens):
    directory, model = tiny_model(family)
    query, items = random_ids(rng, 67), [random_ids(rng, n) for n in (1, 2, 20, 20, 63, 111, 3)]
    with Scorer(str(directory), max_batch_tokens=max_batch_tokens) as scorer:
        options = {"label_token_ids": [2, 0, 1, 1], "logprobs": True, "logits": True}
        for some in (items, items[:1]):
            result = scorer.score(query, some, **options)
            check(model, [query + item for item in some], result, [2, 0, 1, 1])


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        *(("torch", count) for count in (1, 5)),
        pytest.param("jax", 5, marks=needs_jax),
        pytest.param("jax", 1, marks=[needs_jax, pytest.mark.slow]),
    ],
)
def test_one_class_and_several(tiny_model, rng, backend, count):
    directory, model = tiny_model("qwen3_classes", id2label=names(count), num_hidden_layers=1)
    query, items = random_ids(rng, 40), [random_ids(rng, n) for n in (1, 9, 90)]
    labels = list(range(count))
    with Scorer(str(directory), backend=backend, dtype="float32", max_batch_tokens=64) as scorer:
        options = {"label_token_ids": labels, "logprobs": True, "logits": True}
        check(model, [query + i for i in items], scorer.score(query, items, **options), labels)


def test_a_reranker_as_one_class_scores_the_same(tiny_model, tmp_path, rng):
    """Conversions of yes/no rerankers make score.weight = W_yes - W_no."""
    yes, no = 17, 399
    directory, _ = tiny_model("qwen3", tie_word_embeddings=True)
    converted = copy_of(directory, tmp_path)
    edit_config(
        converted, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "relevant"}
    )
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"score.weight": head[[yes]] - head[[no]]}, converted / "model.safetensors")
    query, items = random_ids(rng, 50), [random_ids(rng, int(n)) for n in rng.integers(1, 60, 30)]
    with Scorer(str(directory), max_batch_tokens=512) as scorer:
        pairs = scorer.score(query, items, label_token_ids=[yes, no], logits=True).logits
    with Scorer(str(converted), max_batch_tokens=512) as scorer:
        result = scorer.score(query, items, labels=["relevant"], logits=True)
    expected = pairs[:, 0] - pairs[:, 1]
    assert expected.std() > 1
    np.testing.assert_allclose(result.logits[:, 0], expected, atol=1e-4, rtol=0)
    assert result.scores == pytest.approx(1, abs=1e-5)


def test_labels_are_classes_and_prompts_are_tokens(tiny_model, rng):
    directory, model = tiny_model("qwen3_classes")
    query, items = random_ids(rng, 20), [[VOCAB - 1], random_ids(rng, 7)]
    options = {"logprobs": True, "logits": True}
    with Scorer(str(directory), max_batch_tokens=512) as scorer:
        named = scorer.score(query, items, labels=["no idea", "good"], **options)
        check(model, [query + item for item in items], named, [2, 0])
        text = scorer.score("a query", [" and an item"], labels=NAMES)
        assert text.scores.sum() == pytest.approx(1), "over all classes"
        with pytest.raises(TokenIdOutOfRange, match="holds class 3, valid are 0 to 2"):
            scorer.score(query, items, label_token_ids=[0, 3])
        with pytest.raises(TokenIdOutOfRange, match="holds token id 400, valid are 0 to 399"):
            scorer.score(query, [[VOCAB]], label_token_ids=[0])
        for wrong in ("not", "Good", "good ", ""):
            with pytest.raises(InvalidRequest) as raised:
                scorer.score(query, items, labels=["good", wrong])
            assert raised.value.message == "labels[1] names none of the model's 3 classes"
            assert raised.value.param == "labels[1]"


def test_a_name_of_two_classes(tiny_model):
    directory, _ = tiny_model("qwen3_classes", id2label={0: "a", 1: "b", 2: "a"})
    with Scorer(str(directory), max_batch_tokens=512) as scorer:
        with pytest.raises(InvalidRequest, match="names 2 of the model's 3 classes; send"):
            scorer.score([1], [[2]], labels=["a"])
        assert scorer.score([1], [[2]], labels=["b"]).scores.shape == (1, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_the_same_bits_in_every_batch(tiny_model, rng, count):
    """The check at start covers this too: libraries compute products with so few columns
    differently."""
    directory, _ = tiny_model("qwen3_classes", id2label=names(count), num_hidden_layers=1)
    query, items = random_ids(rng, 30), [random_ids(rng, int(n)) for n in rng.integers(1, 40, 9)]
    with Scorer(str(directory), deterministic=True, compile="off", max_batch_tokens=512) as scorer:
        options = {"label_token_ids": [0], "logprobs": True, "logits": True}
        packed = scorer.score(query, items, **options)
        for row, item in enumerate(items):
            alone = scorer.score(query, [item], **options)
            assert alone.logits[0] == packed.logits[row]
            assert alone.logprobs[0] == packed.logprobs[row]


def copy_of(directory, tmp_path):
    target = tmp_path / "copy"
    shutil.copytree(directory, target)
    return target


def edit_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must be an object with the keys 0, 1, 2"),
        ({"id2label": ["a", "b", "c"]}, "id2label must be an object with the keys"),
        ({"id2label": {}}, "the name of at least one class"),
        ({"id2label": {"0": "a", "1": 1, "2": "c"}}, "the name of at least one class"),
        ({"id2label": {"0": "\ud800"}}, "the name of at least one class"),
        ({"num_labels": 2}, "num_labels is 2 and id2label has 3 names; supported: equal numbers"),
        ({"id2label": None, "num_labels": 0}, "num_labels must be a positive integer, found 0"),
        ({"is_causal": False}, "is_causal is False; supported: causal models"),
        ({"architectures": ["GemmaForTokenClassification"]}, "Qwen3ForSequenceClassification"),
        # The default number of classes.
        ({"id2label": None}, r"score.weight has shape \[3, 48\], config.json asks for \[2, 48\]"),
    ],
)
def test_refused_configurations(tiny_model, tmp_path, fields, message):
    directory = copy_of(tiny_model("qwen3_classes")[0], tmp_path)
    edit_config(directory, **fields)
    with pytest.raises(ConfigError, match=message):
        create_backend(plan_backend(directory, ModelConfig()))


def test_refused_weights(tiny_model, tmp_path):
    directory = copy_of(tiny_model("qwen2_classes")[0], tmp_path)
    tensors = load_file(directory / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not use, such as lm_head\.weight"):
        create_backend(plan_backend(directory, ModelConfig()))
    tensors.pop("score.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensor score.weight"):
        create_backend(plan_backend(directory, ModelConfig()))


def test_a_half_precision_trunk_with_a_float32_head(tiny_model, tmp_path, rng):
    source, model = tiny_model("qwen3_classes")
    directory = copy_of(source, tmp_path)
    tensors = load_file(source / "model.safetensors")
    half = {n: t if n == "score.weight" else t.bfloat16() for n, t in tensors.items()}
    save_file(half, directory / "model.safetensors")
    edit_config(directory, dtype="bfloat16")
    rounded = type(model).from_pretrained(source)
    rounded.load_state_dict({name: tensor.float() for name, tensor in half.items()})
    query, items = random_ids(rng, 20), [random_ids(rng, n) for n in (1, 9)]
    options = {"label_token_ids": [0, 1, 2], "logprobs": True, "logits": True}
    with Scorer(str(directory), dtype="float32", max_batch_tokens=512) as scorer:
        result = scorer.score(query, items, **options)
    check(rounded.eval(), [query + item for item in items], result, [0, 1, 2])


def test_what_is_shown_and_counted(tiny_model, capsys):
    directory, model = tiny_model("qwen2_classes")
    plan = plan_backend(directory, ModelConfig())
    assert count_parameters(plan.architecture.config) == model.num_parameters()
    assert main(["info", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "Qwen2ForSequenceClassification" in shown
    assert "classification, 3 classes: good, not good, no idea" in shown
    assert main(["parity", "run", str(directory), "--dtype", "float32"]) == 78
    assert "language models, whose labels are tokens" in capsys.readouterr().err
