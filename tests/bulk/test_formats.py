"""Promise: a batch job keeps all columns and the order of its input, in every format, and adds the
scores that each prompt has alone. Parquet stays Parquet; CSV becomes JSON lines."""

import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from gpuscore.errors import ConfigError, TooManyTokens
from support.batch_jobs import (
    OUTPUTS,
    check,
    make_rows,
    read_jsonl,
    read_output,
    run,
    write_input,
    write_jsonl,
)

ROWS = make_rows(111)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_format(tmp_path, kind):
    output = tmp_path / f"scored.{OUTPUTS[kind]}"
    assert run(write_input(tmp_path, kind, ROWS), output) == (111, 0)
    rows = read_output(output)
    expected = [{**row, "id": str(row["id"])} if kind == "csv" else row for row in ROWS]
    assert [{k: v for k, v in row.items() if k != "scores"} for row in rows] == expected
    assert list(rows[0]) == ["id", "query", "item", "scores"]
    check(ROWS, [row["scores"] for row in rows])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"input.{kind}", output.name])


def test_json_lines_keep_their_bytes(tmp_path):
    """Large and odd numbers, the order of fields and white space inside are not touched."""
    line = b'{ "n": 123456789012345678901234567890, "x": 1.50,  "item":"caf\\u00e9", "query": "a" }'
    output = tmp_path / "out.jsonl"
    run(write_jsonl(tmp_path / "in.jsonl", [b"  " + line + b"\t\r", b"", line]), output)
    first, second = output.read_bytes().splitlines()
    assert first == second
    assert first.startswith(line[:-2] + b',"scores":[')
    check([json.loads(line)] * 2, [row["scores"] for row in read_jsonl(output)])


def columns():
    """Return one column of each kind that a simpler program would spoil."""
    day = datetime.datetime(2026, 11, 22, 23, 59, 59, 999999)
    return {
        "large": pa.array([2**63 - 1, None, -(2**63)]),
        "unsigned": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "nanoseconds": pa.array([1, None, 10**18 + 1], pa.timestamp("ns", "UTC")),
        "days": pa.array([day.date(), None, day.date()]),
        "exact": pa.array([decimal.Decimal("1.10"), None, None], pa.decimal128(10, 2)),
        "nested": pa.array([[{"a": [1]}], [], None]),
        "bytes": pa.array([b"\xff\x00", None, b""]),
        "names": pa.array(["a", "b", "a"]).dictionary_encode(),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
    }


def test_columns_of_parquet_keep_their_types(tmp_path):
    texts = {"query": pa.array(["q"] * 3), "item": pa.array(["a", "b", "c"], pa.large_string())}
    table = pa.table({**texts, **columns()}).replace_schema_metadata({"made by": "a test"})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    scores = table.column("scores").to_pylist()
    table = table.drop_columns("scores")
    assert table.equals(parquet.read_table(tmp_path / "in.parquet"))
    assert table.schema.metadata[b"made by"] == b"a test"
    check([{"query": "q", "item": item} for item in "abc"], scores)


def test_csv_as_spreadsheets_write_it(tmp_path):
    text = '\ufeffitem,query,"a, b"\r\n"two\r\nlines, ""quoted""",q,007\r\n\r\nlast,q,\r\n'
    (tmp_path / "in.csv").write_bytes(text.encode())
    run(tmp_path / "in.csv", tmp_path / "out.jsonl")
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [(row["item"], row["a, b"]) for row in rows] == [
        ('two\r\nlines, "quoted"', "007"),
        ("last", ""),
    ]
    check(rows, [row["scores"] for row in rows])


@pytest.mark.parametrize("kind", OUTPUTS)
def test_no_rows(tmp_path, kind):
    source = tmp_path / f"in.{kind}"
    source.write_text("query,item\n" if kind == "csv" else "")
    if kind == "parquet":
        schema = pa.schema([("query", pa.string()), ("item", pa.string())])
        parquet.write_table(schema.empty_table(), source)
    output = tmp_path / f"out.{OUTPUTS[kind]}"
    assert run(source, output) == (0, 0)
    if kind != "parquet":
        assert output.read_bytes() == b""
    else:
        schema = parquet.read_schema(output)
        assert schema.names == ["query", "item", "scores"]
        assert schema.field("scores").type == pa.list_(pa.float64())


def test_prompts_without_a_query(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    run(source, tmp_path / "alone.jsonl", query_column=None)
    scores = [row["scores"] for row in read_jsonl(tmp_path / "alone.jsonl")]
    check([{"query": "", "item": row["item"]} for row in ROWS], scores)


def test_probabilities_over_the_whole_vocabulary(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    run(source, tmp_path / "out.jsonl", apply_softmax=False)
    scores = np.array([row["scores"] for row in read_jsonl(tmp_path / "out.jsonl")])
    assert not np.isclose(scores.sum(axis=1), 1).any()
    check(ROWS, scores / scores.sum(axis=1, keepdims=True))


REFUSED = {
    "no suffix": ("in.txt", "x", {}, "supported: files that end with"),
    "a name twice": ("in.csv", "query,item,item\n", {}, "two equal names"),
    "no header": ("in.csv", "", {}, "not the header"),
    "no Parquet": ("in.parquet", "PAR1", {}, "cannot be read as Parquet"),
    "no prompts": ("in.jsonl", "", {"labels": None}, "--labels is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_start(tmp_path, case):
    name, text, options, message = REFUSED[case]
    (tmp_path / name).write_text(text)
    output = tmp_path / ("out.parquet" if name.endswith("parquet") else "out.jsonl")
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / name, output, **options)
    assert not output.exists()


def test_labels_are_checked_before_the_rows_are_read(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [b"{bad"])
    with pytest.raises(TooManyTokens):
        run(source, tmp_path / "out.jsonl", labels="yes," + "a long label " * 40)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuscore.commands.bulk.inputs.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Parquet needs pyarrow: pip install"):
        run(write_input(tmp_path, "parquet", ROWS), tmp_path / "out.parquet")
    assert run(write_input(tmp_path, "jsonl", ROWS), tmp_path / "out.jsonl") == (111, 0)
