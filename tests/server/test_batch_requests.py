"""Promise: `gpuscore batch --requests` answers each line as the server answers the same body, and
takes and writes OpenAI's batch format."""

import json

import pytest

from support import programs
from support.batch_jobs import read_jsonl, write_jsonl
from support.connections import same_answer
from support.serving import QUICK

QUERY = "query: a blue lamp\nitem: "
SCORE = {"query": QUERY, "items": ["A blue lamp.", "A chair."], "labels": ["yes", "no"]}
RERANK = {"query": "a blue lamp", "documents": ["A red chair.", "A blue lamp."]}
PROMPTS = [QUERY + "A blue lamp.", "A chair of wood.", QUERY + "A blue lamb."]  # two begin alike
CALLS = [
    ("/v1/score", SCORE),
    ("/v1/rerank", RERANK),
    ("/v1/score", {**SCORE, "items": ["A lamp."], "apply_softmax": True, "model": "demo"}),
    ("/v1/score", {**SCORE, "items": []}),
    ("/v1/score", {**SCORE, "labels": ["two words"], "return_label_mass": True}),
    ("/v1/score", {**SCORE, "labels": ["two words"], "label_length_normalization": "mean"}),
    ("/v1/score", {**SCORE, "labels": ["word " * 50]}),
    ("/v1/score", {**SCORE, "unknown": 1}),
    ("/v1/score", {**SCORE, "items": [None, "A lamp."], "on_error": "null"}),
    ("/v1/score", {**SCORE, "items": [None], "on_error": "null", "return_label_mass": True}),
    ("/v1/rerank", {**RERANK, "documents": [None, "A chair."], "on_error": "null"}),
    ("/v1/rerank", {**RERANK, "documents": [None], "on_error": "null"}),
    ("/v1/score", {"queries": "a", "documents": [None, "b"], "on_error": "null"}),
    ("/rerank", {"query": "q", "texts": []}),
    ("/rerank", {"query": "lamp", "texts": ["A lamp.", "A rug."], "raw_scores": True}),
    ("/v1/classify", {"input": "query: lamp\nitem: A lamp.", "labels": ["yes", "no"]}),
    ("/v1/score", {**SCORE, "model": "another"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/nowhere", {}),
    ("/tokenize", {"prompt": "a lamp"}),
    ("/v1/completions", {"prompt": "A lamp.", "max_tokens": 1}),
    ("/v1/completions", {"prompt": PROMPTS, "max_tokens": 1, "echo": True, "logprobs": 3}),
    ("/v1/completions", {"prompt": PROMPTS, "max_tokens": 0, "echo": True}),
]


def test_answers_are_those_of_the_server(demo, tmp_path):
    lines = [
        {"custom_id": f"call {i}", "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(CALLS)
    ]
    lines.append({**lines[0], "custom_id": "wrong method", "method": "GET"})
    lines.append({**lines[0], "custom_id": "no object", "body": "text"})
    bad = [{"method": "POST"}, b"no JSON"]
    source = write_jsonl(tmp_path / "in.jsonl", [*lines, *bad])
    output = tmp_path / "out.jsonl"
    done = programs.run(
        "batch", "demo", "--requests", "--input", source, "--output", output, *QUICK
    )
    assert done.returncode == 1, done.stderr
    answered = read_jsonl(output)
    assert [line["custom_id"] for line in answered] == [line["custom_id"] for line in lines]
    for line, (url, body) in zip(answered, CALLS, strict=False):
        answer = demo.post(url, json=body)
        assert line["response"]["status_code"] == answer.status_code, url
        same_answer(line["response"]["body"], answer.json(), where=url)
    assert [line["response"]["status_code"] for line in answered[-2:]] == [405, 400]
    for line in answered:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["error"] is None
    assert len({line["id"] for line in answered}) == len(answered)
    assert f"{len(lines)} rows in" in done.stdout
    failed = sum(line["response"]["status_code"] != 200 for line in answered)
    assert f"{failed} of them answered with an error" in done.stdout
    assert f"{failed + 2} of {len(lines) + 2} rows are bad" in done.stderr
    reasons = [row["reason"] for row in read_jsonl(tmp_path / "out.jsonl.bad.jsonl")]
    assert all(reason.startswith("the line is not a request: ") for reason in reasons)
    assert "missing required field `custom_id`" in reasons[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--labels", "yes,no"), "--requests excludes --labels"),
        (("--output", "out.parquet"), "of JSON lines, it must end with .jsonl"),
        (("--input", "in.csv"), "requests are JSON lines"),
    ],
)
def test_requests_exclude_the_flags_of_tables(tmp_path, flags, message):
    for name in ("in.jsonl", "in.csv"):
        (tmp_path / name).write_text(json.dumps({}))
    arguments = {"--input": "in.jsonl", "--output": "out.jsonl"} | dict([flags])
    words = []
    for name, value in arguments.items():
        words += [name, value if name == "--labels" else tmp_path / value]
    done = programs.run("batch", "demo", "--requests", *words)
    assert done.returncode == 78
    assert message in done.stderr
