"""Promise: models with several classes, with one class, and guards answer over HTTP with the
model's own probabilities."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, TextClassificationPipeline

import gpuscore
from gpuscore import Scorer
from gpuscore.prompts.classes import Classes
from gpuscore.prompts.discovery import ClassifierHead, read_classifier_head
from support.connections import check_error, connected
from support.models import make_model, reference_logits
from support.serving import SMALL, serving

TEXTS = ["a query and an item", "", "ein Satz", "naïve café " * 20]
TEXTS[1] = "x"
NAMES = ["calm", "annoyed", "angry"]


def softmax(rows):
    shares = np.exp(rows - rows.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def sigmoid(rows):
    return 1 / (1 + np.exp(-rows))


def classified(client, **more):
    answer = client.post("/v1/classify", json={"input": TEXTS} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_several_classes(tmp_path):
    model = make_model(tmp_path, "qwen3_classes", id2label=dict(enumerate(NAMES)))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    logits = reference_logits(model, [tokenizer.encode(text).ids for text in TEXTS])
    with serving(tmp_path, *SMALL) as running, connected(running) as client:
        answer = classified(client)
        assert answer["labels"] == NAMES
        probs = np.array([entry["probs"] for entry in answer["data"]])
        np.testing.assert_allclose(probs, softmax(logits), atol=1e-4)
        best = [NAMES[i] for i in logits.argmax(axis=1)]
        assert [entry["label"] for entry in answer["data"]] == best
        raw = [entry["probs"] for entry in classified(client, use_activation=False)["data"]]
        np.testing.assert_allclose(raw, logits, atol=1e-4)
        some = classified(client, labels=["angry", "calm"])
        probs = [entry["probs"] for entry in some["data"]]
        np.testing.assert_allclose(probs, softmax(logits[:, [2, 0]]), atol=1e-4)
        scores = client.post("/v1/score", json={"items": TEXTS}).json()["scores"]
        np.testing.assert_allclose(scores, softmax(logits), atol=1e-4)
        info = client.get("/info").json()
        assert info["model_type"]["classifier"]["label2id"] == {n: i for i, n in enumerate(NAMES)}
        refused = client.post("/v1/classify", json={"input": TEXTS, "labels": ["glad"]})
        check_error(refused, 400, "invalid_request", "labels[0]")
        ranking = client.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert "no known family" in check_error(ranking, 400, "invalid_request", None)


def test_one_class_and_a_reward_model(tmp_path):
    """/v1/classify sends the text as it is, /rerank puts it into the model's conversation."""
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    directory = tmp_path / "Skywork-Reward-tiny"
    directory.mkdir()
    model = make_model(directory, "qwen3_classes", num_labels=1)
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    logits = reference_logits(model, [tokenizer.encode(text).ids for text in TEXTS])
    prompts = [f"[user] q\n[assistant] {text}\n" for text in TEXTS]
    rewards = reference_logits(model, [tokenizer.encode(prompt).ids for prompt in prompts])[:, 0]
    with serving(directory, *SMALL) as running, connected(running) as client:
        probs = [entry["probs"] for entry in classified(client)["data"]]
        np.testing.assert_allclose(probs, sigmoid(logits), atol=1e-4)
        results = client.post("/rerank", json={"query": "q", "documents": TEXTS}).json()["results"]
        assert [r["index"] for r in results] == np.argsort(-rewards).tolist()
        got = {r["index"]: r["relevance_score"] for r in results}
        np.testing.assert_allclose([got[i] for i in range(4)], rewards, atol=1e-4)


def test_the_numbers_of_a_regression(tmp_path):
    """They are the head's own on every route and in Python, as in transformers' pipeline."""
    directory = tmp_path / "Qwen3-Reranker-0.1B-head"
    directory.mkdir()
    settings = {"id2label": {0: "score"}, "problem_type": "regression"}
    model = make_model(directory, "qwen3_classes", **settings)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pipe = TextClassificationPipeline(model=model, tokenizer=tokenizer)
    wanted = [[answer["score"]] for answer in pipe(TEXTS)]
    with Scorer(str(directory), threads=1, max_batch_tokens=64) as scorer:
        own = scorer.classify(TEXTS)
        np.testing.assert_allclose(own.probabilities, wanted, atol=1e-4)
        pairs = [("q", text) for text in TEXTS]
        ranked = scorer.score_pairs(pairs).scores
        raw = scorer.score_pairs(pairs, raw_scores=True).scores
        np.testing.assert_allclose(ranked, raw, atol=1e-5)
    with serving(directory, *SMALL) as running, connected(running) as client:
        data = classified(client)["data"]
        np.testing.assert_allclose([entry["probs"] for entry in data], wanted, atol=1e-4)
        body = {"query": "q", "documents": TEXTS}
        results = client.post("/rerank", json=body).json()["results"]
        got = {r["index"]: r["relevance_score"] for r in results}
        np.testing.assert_allclose([got[i] for i in range(4)], ranked, atol=1e-4)
        info = client.get("/info").json()["gpuscore"]
        assert (info["family"]["activation"], info["classes_activation"]) == ("none", "none")


@pytest.fixture(scope="module")
def guard_directory(tmp_path_factory):
    """The demo model with a guard's template; its verdicts on safety mean nothing."""
    directory = tmp_path_factory.mktemp("guard")
    demo = Path(gpuscore.__file__).parent / "demo"
    for file in demo.iterdir():
        shutil.copy(file, directory)
    template = (
        "{% for m in messages %}[{{ m.role }}]: {{ m.content }}\n{% endfor %}"
        "Is the last of them safe?"
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_guards(guard_directory):
    flags = (*SMALL, "--family", "llama-guard-3", "--max-model-len", "512")
    tokenizer = Tokenizer.from_file(str(guard_directory / "tokenizer.json"))
    texts = ["a blue lamp", "a red rug"]
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    labels = [ids(label)[0] for label in ("safe", "unsafe")]

    ends = "\nIs the last of them safe?"  # Jinja drops the newline at a template's end
    prompts = [f"[user]: {text}{ends}" for text in texts]
    prompts += [f"[user]: what is it?\n[assistant]: {text}{ends}" for text in texts]
    whole = [ids(prompt) + ids("\n\n") for prompt in prompts]
    with Scorer(str(guard_directory), threads=1, max_batch_tokens=64) as scorer:
        wanted = scorer.score([], whole, label_token_ids=labels, apply_softmax=True).scores
    alone, answering = wanted[:2], wanted[2:]
    with serving(guard_directory, *flags) as running, connected(running) as client:
        answer = client.post("/v1/classify", json={"input": texts}).json()
        assert answer["labels"] == ["safe", "unsafe"]
        probs = [entry["probs"] for entry in answer["data"]]
        np.testing.assert_allclose(probs, alone, atol=1e-5)
        body = {"input": texts, "query": "what is it?"}
        answer = client.post("/v1/classify", json=body).json()
        probs = [entry["probs"] for entry in answer["data"]]
        np.testing.assert_allclose(probs, answering, atol=1e-5)
        long = {"input": ["lamp " * 900], "truncate": True}
        assert client.post("/v1/classify", json=long).json()["data"][0]["truncated"]
        long["truncate"] = False
        check_error(client.post("/v1/classify", json=long), 400, "prompt_too_long", "input[0]")
        ranking = client.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert "is a guard" in check_error(ranking, 400, "invalid_request", None)
        assert "classifier" in client.get("/info").json()["model_type"]


def test_several_right_classes(tmp_path):
    """If the model's configuration says so, each class has a probability of its own."""
    config = {"architectures": ["Qwen3ForSequenceClassification"]}
    config["id2label"] = dict(enumerate(NAMES))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_classifier_head(tmp_path) == ClassifierHead(3, "softmax")
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_classifier_head(tmp_path) == ClassifierHead(3, "sigmoid")
    config |= {"problem_type": "regression", "pad_token_id": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_classifier_head(tmp_path) == ClassifierHead(3, "none", padding=4)
    config |= {"text_config": {"pad_token_id": 5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_classifier_head(tmp_path) == ClassifierHead(3, "none", padding=5)
    logits = np.array([[3.0, -1.0, 0.5], [-800.0, 800.0, 0.0]])
    probabilities = Classes([], "sigmoid").probabilities(logits)
    np.testing.assert_allclose(probabilities[0], sigmoid(logits[0]))
    np.testing.assert_allclose(probabilities[1], [0, 1, 0.5])
    np.testing.assert_allclose(Classes([], "softmax").probabilities(logits), softmax(logits))
    np.testing.assert_array_equal(Classes([], "none").probabilities(logits), logits)
