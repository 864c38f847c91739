"""Promise: lm-evaluation-harness gives the same results over HTTP as for the same model in its own
process, and the choices of one context share it."""

import json
import os
import urllib.request
from pathlib import Path

import lm_eval
import pytest
import requests
from lm_eval.tasks import TaskManager

ITEMS = (
    ("a blue wooden chair", "A wooden garden chair in blue.", "yes"),
    ("a blue wooden chair", "A red steel lamp.", "no"),
    ("a red lamp", "A red steel lamp.", "yes"),
    ("a wool scarf, grün", "A green wool scarf.", "no"),
    ("a green rug", "A rug.", "yes"),
)
TEXTS = ("A red steel lamp. A wooden garden chair in blue.", "x", "Ein grüner Teppich, 3 m × 4 m.")
# Two contexts of about 1,000 tokens, with four choices of several tokens.
LONG = [
    {
        "context": " ".join(f"{n}: {word} {thing}." for n in range(130)) + " What is it?",
        "choices": [f" {word} {thing}", f" {word} sofa", f" grey {thing}", " a sofa in grey"],
    }
    for word, thing in (("red", "lamp"), ("blue", "chair"))
]
YAML = {
    "choose": """
        output_type: multiple_choice
        doc_to_text: "query: {{query}}\\nitem: {{item}}"
        target_delimiter: ""
        doc_to_choice: ["yes", "no"]
        doc_to_target: "{{label}}"
        metric_list: [{metric: acc}]
    """,
    "four": """
        output_type: multiple_choice
        doc_to_text: "{{context}}"
        target_delimiter: ""
        doc_to_choice: choices
        doc_to_target: 0
        metric_list: [{metric: acc}]
    """,
    "read": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: byte_perplexity}]
    """,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tasks")
    rows = {
        "choose": [{"query": q, "item": i, "label": label} for q, i, label in ITEMS],
        "four": LONG,
        "read": [{"text": text} for text in TEXTS],
    }
    for name, lines in rows.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        head = {"task": name, "test_split": "test"} | source
        body = "\n".join(line.strip() for line in YAML[name].strip().splitlines())
        text = "".join(f"{field}: {json.dumps(value)}\n" for field, value in head.items())
        (directory / f"{name}.yaml").write_text(text + body + "\n", encoding="utf-8")
    return directory


def evaluate(tasks: Path, model: str, arguments: dict[str, str], names=("choose", "read")):
    """Return accuracy or perplexity, and the log-likelihoods of every sample of each task."""
    evaluated = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=1 if model == "hf" else 3,
        device="cpu" if model == "hf" else None,
        bootstrap_iters=0,
    )
    samples = {
        name: [sample["filtered_resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in evaluated["samples"].items()
    }
    return evaluated["results"], samples


@pytest.fixture(scope="module")
def expected(tasks):
    """The results of transformers in lm-eval's own process."""
    directory = os.environ["MODEL_DIRECTORY"]
    return evaluate(tasks, "hf", {"pretrained": directory, "dtype": "float32"})


@pytest.mark.parametrize("backend", ["remote", "auto", "huggingface"])
def test_log_likelihoods(server, tasks, expected, backend, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    arguments = {"base_url": server.url + "/v1/completions", "model": "demo"}
    arguments |= {"tokenizer_backend": backend, "auth_token": server.key}
    if backend == "huggingface":
        arguments["tokenizer"] = os.environ["MODEL_DIRECTORY"]
    results, samples = evaluate(tasks, "local-completions", arguments)
    theirs, their_samples = expected
    assert results["choose"]["acc,none"] == theirs["choose"]["acc,none"]
    assert len(samples["choose"]) == len(ITEMS)
    for ours, wanted in zip(samples["choose"], their_samples["choose"], strict=True):
        assert [p for p, _ in ours] == pytest.approx([p for p, _ in wanted], abs=1e-3)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in wanted]
    assert {greedy for sample in samples["choose"] for _, greedy in sample} == {True, False}
    assert len(samples["read"]) == len(TEXTS)
    for ours, wanted in zip(samples["read"], their_samples["read"], strict=True):
        assert ours == pytest.approx(wanted, abs=1e-3)
    assert results["read"]["byte_perplexity,none"] == pytest.approx(
        theirs["read"]["byte_perplexity,none"], rel=1e-4
    )


def tokens(server) -> dict[str, float]:
    """Return the server's counts of prompt tokens and of cached tokens."""
    request = urllib.request.Request(
        server.url + "/metrics", headers={"Authorization": f"Bearer {server.key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.decode().split() for line in answer if not line.startswith(b"#")]
    return {
        kind: sum(float(n) for name, n in lines if name.startswith(f"gpuscore_{kind}_tokens_total"))
        for kind in ("prompt", "cached")
    }


def test_choices_share_their_context(server, tasks, monkeypatch):
    """At most a third of the tokens of four choices are computed."""
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    arguments = {"base_url": server.url + "/v1/completions", "model": "demo"}
    arguments |= {"tokenizer_backend": "remote", "auth_token": server.key}
    before = tokens(server)
    _, samples = evaluate(tasks, "local-completions", arguments, ["four"])
    after = tokens(server)
    model = {"pretrained": os.environ["MODEL_DIRECTORY"], "dtype": "float32"}
    _, wanted = evaluate(tasks, "hf", model, ["four"])
    ours, sent = samples["four"], after["prompt"] - before["prompt"]
    for choices, theirs in zip(ours, wanted["four"], strict=True):
        assert len(choices) == 4
        assert [p for p, _ in choices] == pytest.approx([p for p, _ in theirs], abs=1e-3)
        assert [greedy for _, greedy in choices] == [greedy for _, greedy in theirs]
    assert sent > 8 * 900
    assert sent - (after["cached"] - before["cached"]) <= sent / 3


def test_the_tokenizer_needs_the_key(server):
    """The harness looks for a tokenizer without OPENAI_API_KEY; it sends `auth_token` instead."""
    assert requests.get(server.url + "/tokenizer_info", timeout=30).status_code == 401
