"""Promise: `gpuscore batch --requests` answers each line as the server answers the same body, and
takes and writes OpenAI's batch format."""

import json

import pytest

from support import programs
from support.batch_jobs import read_jsonl, write_jsonl
from support.connections import same_answer
from support.serving import QUICK
from support.wire import ANSWERED, REFUSED

CALLS = [*ANSWERED.values(), *REFUSED.values()]


def test_answers_are_those_of_the_server(demo, tmp_path):
    lines = [
        {"custom_id": f"call {i}", "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(CALLS)
    ]
    lines.append({**lines[0], "custom_id": "no object", "body": "text"})
    bad = [{"method": "POST"}, {**lines[0], "method": "GET"}, b"no JSON"]
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
    assert answered[-1]["response"]["status_code"] == 400
    for line in answered:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["error"] is None
    assert len({line["id"] for line in answered}) == len(answered)
    assert f"out.jsonl: {len(lines)}\n" in done.stdout
    failed = sum(line["response"]["status_code"] != 200 for line in answered)
    assert f"answers with an error: {failed}\n" in done.stdout
    assert f"{failed + 3} of {len(lines) + 3} rows are bad" in done.stderr
    reasons = [row["reason"] for row in read_jsonl(tmp_path / "out.jsonl.bad.jsonl")]
    assert all(reason.startswith("the line is not a request: ") for reason in reasons)
    assert "missing required field `custom_id`" in reasons[0]
    assert "Invalid enum value 'GET'" in reasons[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--labels", "yes,no"), "--requests and --labels exclude each other"),
        (("--output", "out.parquet"), "for JSON lines it must end with .jsonl"),
        (("--input", "in.csv"), "--requests needs JSON lines"),
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
