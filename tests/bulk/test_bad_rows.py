"""Promise: no row is lost: each is either scored or in OUTPUT.bad.jsonl, with its content (of
Parquet, the columns that are read) and reason."""

import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from gpuscore.commands.bulk.inputs import Input
from gpuscore.config import RequestLimits
from support.batch_jobs import check, fake_model, make_rows, read_jsonl, run, write_jsonl
from support.slow import slow

GOOD = {"query": "q", "item": "good"}
# A line, and the reason why it is bad.
LINES = [
    (b'{"query": null, "item": "x"}', "query is not text"),
    (b'{"query": "q", "item": 7}', "item is not text"),
    (b'{"query": "q", "item": ["x"]}', "item is not text"),
    (b'{"query": true, "item": "x"}', "query is not text"),
    (b'{"item": "x"}', "there is no field query"),
    (b'["q", "x"]', "the line is not a JSON object: Expected `object`, got `array`"),
    (b'{"query": "q", "item": "x"', "the line is not a JSON object: Input data was truncated"),
    (b'{"query": "q", "item": "\xff"}', "the line is not UTF-8: invalid start byte"),
    (b'{"query": "q", "item": "\\ud800"}', "the line is not a JSON object: "),
    (b'{"query": "q", "item": "x", "n": NaN}', "the line is not a JSON object: JSON is malformed"),
    (b"[" * 100_000, "the line is not a JSON object: "),
    (b'{"query": "", "item": ""}', "empty_prompt: the row gives a prompt of 0 tokens"),
    (b'{"query": "q", "item": "' + b"x y " * 16_500 + b'"}', "prompt_too_long: the row gives a"),
]


def bad_rows(output):
    return read_jsonl(output.with_name(f"{output.name}.bad.jsonl"))


def test_bad_lines(tmp_path):
    lines = [line for pair in LINES for line in (pair[0], GOOD)]
    output = tmp_path / "out.jsonl"
    outcome = run(write_jsonl(tmp_path / "in.jsonl", [b"", *lines]), output)
    assert outcome == (len(LINES), len(LINES))
    check([GOOD] * len(LINES), [row["scores"] for row in read_jsonl(output)])
    refused = bad_rows(output)
    assert [row["line"] for row in refused] == [2 + 2 * index for index in range(len(LINES))]
    for row, (line, reason) in zip(refused, LINES, strict=True):
        assert row["reason"].startswith(reason), line
    assert refused[0]["input"] == '{"query": null, "item": "x"}'
    assert refused[7]["input"] == '{"query": "q", "item": "\\xff"}'


def test_a_line_without_an_end_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuscore.commands.bulk.inputs.MAX_LINE", 100)
    line = b'{"query": "q", "item": "%b"}' % (b"x" * 10**6)
    source, output = write_jsonl(tmp_path / "in.jsonl", [line, GOOD, line]), tmp_path / "out.jsonl"
    del line
    tracemalloc.start()
    try:
        blocks = Input(source, "JSON lines", []).blocks()
        assert [len(block.rows) for block in blocks] == [3]
        assert tracemalloc.get_traced_memory()[1] < 3 * 10**5  # Python 3.14 buffers 2**17 bytes
    finally:
        tracemalloc.stop()
    run(source, output)
    assert [row["line"] for row in bad_rows(output)] == [1, 3]
    assert [row["reason"] for row in bad_rows(output)] == ["the line has over 100 bytes"] * 2
    assert len(read_jsonl(output)) == 1


def test_bad_rows_of_csv(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuscore.commands.bulk.inputs.MAX_FIELD", 200)
    lines = [
        b"query,item",
        b"q,good",
        b"q",
        b"q,x,more",
        b'"q"x,x',
        b"q,\xff",
        b"q,good",
        b'q,"an open quote',
        *[b"takes,all"] * 30,
        b"q,good",
    ]
    (tmp_path / "in.csv").write_bytes(b"\n".join(lines))
    output = tmp_path / "out.jsonl"
    run(tmp_path / "in.csv", output)
    reasons = {row["line"]: row["reason"] for row in bad_rows(output)}
    assert reasons[3] == "the row has 1 fields, the header has 2"
    assert reasons[4] == "the row has 3 fields, the header has 2"
    assert reasons[5].startswith("the row is not CSV (lines 5 to 5): ")
    assert reasons[6] == "the row is not UTF-8"
    assert reasons[8].startswith("the row is not CSV (lines 8 to 2")
    rows = [row["item"] for row in read_jsonl(output)]
    assert rows[:2] == ["good", "good"]
    assert rows[-1] == "good"


def test_bad_rows_of_parquet(tmp_path):
    wrong = pa.array([b"x", b"\xff", b"x"]).cast(pa.binary()).view(pa.string())
    table = pa.table({"n": [1, 2, 3], "query": ["q", "q", None], "item": wrong})
    parquet.write_table(table, tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    refused = bad_rows(tmp_path / "out.parquet")
    assert [(row["row"], row["reason"]) for row in refused] == [
        (2, "item is not UTF-8: invalid start byte"),
        (3, "query is not text"),
    ]
    assert refused[1]["input"] == '{"query":null,"item":"x"}'
    assert parquet.read_table(tmp_path / "out.parquet").column("n").to_pylist() == [1]


@pytest.mark.parametrize("share", [0.02, *slow(0.6, 1.0)])
def test_rows_over_a_limit_leave_the_others_of_their_request(tmp_path, share):
    rows = make_rows(200, queries=2)
    for row in rows[: int(200 * share)]:
        row["item"] += " a lamp" * 40
    rows = rows[::-1]
    limits = RequestLimits(max_request_tokens=60)  # a long row alone is over it
    output = tmp_path / "out.jsonl"
    scored, bad = run(
        write_jsonl(tmp_path / "in.jsonl", rows), output, lambda: fake_model(limits=limits)
    )
    assert bad == int(200 * share)
    good = rows[:scored]
    assert [row["id"] for row in read_jsonl(output)] == [row["id"] for row in good]
    if good:
        check(good, [row["scores"] for row in read_jsonl(output)])
    assert {row["reason"].split(":")[0] for row in bad_rows(output)} == {"too_many_tokens"}
