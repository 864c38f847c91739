"""Promise: rows that share a query, or that begin alike, are grouped whatever their order, in
memory that does not grow with the rows; a result is read as it was written, or counts as not
there."""

import json
import random
import tracemalloc
from collections import Counter
from itertools import groupby

import numpy as np
import pytest

from gpuscore.commands.bulk.inputs import find_inputs
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.rows import AnswerLine, BadTextRow, RowScoring, TextRow
from gpuscore.commands.bulk.steps import make_plan
from gpuscore.commands.bulk.store import (
    ANSWERED,
    BAD,
    FAILED,
    SCORED,
    ResultStore,
    RowSorter,
    grouped,
    merged,
)
from gpuscore.commands.bulk.work import WorkFolder
from support import programs
from support.batch_jobs import check, encoder, fake_model, make_rows, read_jsonl, run, write_jsonl


@pytest.mark.parametrize("count", [0, 1, 111])
@pytest.mark.parametrize("memory", [1, 1000, 2**20])
def test_rows_are_sorted_on_disk(tmp_path, monkeypatch, count, memory):
    """With memory for one row there are more files than are read at a time."""
    monkeypatch.setattr("gpuscore.commands.bulk.store.FAN_IN", 5)
    rng = random.Random(1)
    texts = [bytes(rng.choices(b"ab\0\n\xff", k=rng.randint(0, 6))) for _ in range(2 * count)]
    rows = [TextRow(texts[2 * i], texts[2 * i + 1], i) for i in range(count)]
    sorter = RowSorter(tmp_path / "sorted", memory)
    for row in rows:
        sorter.add(row)
    files = sorter.finish()
    assert len(files) <= 5
    assert list(merged(files)) == sorted(rows)


def groups_of(rows, **words):
    made = sorted(TextRow(*row, number) for number, row in enumerate(rows))
    groups = list(grouped(made, **words))
    assert [row for group in groups for row in group] == made
    return [[row.number for row in group] for group in groups]


def test_rows_of_one_query_are_one_group():
    rows = [(b"q%d" % (i % 3), b"i%d" % i) for i in range(30)]
    assert sorted(map(sorted, groups_of(rows))) == [list(range(start, 30, 3)) for start in range(3)]
    assert max(map(len, groups_of(rows, most_rows=4))) == 4


def test_rows_with_queries_of_their_own_are_put_together():
    """They stay apart if the cut depends on the query: the bits of a score would, too."""
    rows = [(b"a", b"1"), (b"b", b"1"), (b"c", b"1"), (b"c", b"2"), (b"d", b"1"), (b"e", b"1")]
    assert groups_of(rows) == [[0, 1], [2, 3], [4, 5]]
    assert groups_of(rows, free_cut=False) == [[0], [1], [2, 3], [4], [5]]


def test_rows_that_begin_alike_are_put_together():
    long = [letter * 400 for letter in (b"x", b"y", b"z")]
    rows = [(b"", long[i % 3] + b"%d" % i) for i in range(9)]
    assert groups_of(rows) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert len(groups_of(rows, cached=False)) == 1, "the query would be computed three times"
    own = [(long[i % 3] + b"%d" % i, b"item") for i in range(9)]
    assert groups_of(own) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def seen_by_engine(tmp_path, rows, **backend):
    """Score rows; return the requests that the engine gets, and the number of tokens computed."""
    requests, tokens = Counter(), []

    def around(engine):
        score_all = engine.score_all

        def noted(sent):
            for request in sent:
                requests[
                    request.query_ids.tobytes(), tuple(i.tobytes() for i in request.item_ids)
                ] += 1
            futures = score_all(sent)
            for future in futures:
                future.add_done_callback(lambda done: tokens.append(done.result().computed_tokens))
            return futures

        engine.score_all = noted
        return engine

    source = write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}.jsonl"
    run(source, output, lambda: fake_model(around, **backend), memory=4096)
    check(rows, [row["scores"] for row in read_jsonl(output)])
    return requests, sum(tokens)


def test_the_engine_gets_the_same_requests_in_any_order(tmp_path):
    rows = sorted(make_rows(300, queries=20), key=lambda row: (row["query"], row["item"]))
    queries = len(list(groupby(rows, key=lambda row: row["query"])))
    requests, computed = seen_by_engine(tmp_path, rows, page_size=4)
    assert len(requests) == queries
    random.Random(2).shuffle(rows)
    assert seen_by_engine(tmp_path, rows, page_size=4) == (requests, computed)


def test_what_queries_begin_with_is_computed_once(tmp_path):
    instruction = "a blue wooden chair for the garden, " * 30
    rows = [
        {"query": f"{instruction if i % 2 else ''}query {i}: ", "item": "A lamp."}
        for i in range(40)
    ]
    _, computed = seen_by_engine(tmp_path, rows, page_size=4, max_tokens=256)
    prompts = [row["query"] + row["item"] for row in rows]
    whole = sum(map(len, encoder().prompts(prompts)))
    assert computed < whole / 5


def test_reading_and_sorting_take_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuscore.commands.bulk.inputs.BLOCK_BYTES", 2**18)
    padding = "x" * 1500
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for number in range(6000):
            row = {"query": f"q{number % 99}", "item": f"item {number} {padding}"}
            file.write(json.dumps(row) + "\n")
    options = BatchOptions(source, tmp_path / "out.jsonl", "query", "item", ("yes", "no"))
    store, work = ResultStore(tmp_path, 2), WorkFolder(tmp_path)
    tracemalloc.start()
    try:
        make_plan(find_inputs(options), options, work, store, lambda rows: None, memory=2**20)
        texts = [row.rest for row in merged((tmp_path / "sorted").iterdir()) if row.number < 9]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        store.close()
    assert len(texts) == 9
    assert peak < 5 * 2**20 < source.stat().st_size


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    """The peak of 2 million rows is compared with the peak of 400,000, in MiB."""
    peaks = []
    for count in (400_000, 2_000_000):
        done = programs.run_module("support.batch_memory", tmp_path, count, seconds=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        peaks.append(float(done.stdout.split("peak:")[1]))
    print(f"peaks: {peaks} MiB")
    assert peaks[1] - peaks[0] < 32


@pytest.fixture
def store(tmp_path):
    """A store of rows with three scores, in which row 1 has none."""
    made = ResultStore(tmp_path, 3)
    made.put(RowScoring([4, 0], np.array([[0.1, -0.0, np.inf], [1e-300, 0.2, 0.7]])))
    made.put(BadTextRow(2, "the reason, ☃"))
    made.put(AnswerLine(3, b"{}", failed=False))
    made.put(AnswerLine(6, b"", failed=True))
    yield made
    made.close()


KINDS = [SCORED, 0, BAD, ANSWERED, SCORED, 0, FAILED]


def test_results_are_read_as_they_were_written(store, tmp_path):
    for reader in (store, ResultStore(tmp_path, 3)):
        kinds, scores = reader.scan(0, 9)
        assert kinds == [*KINDS, 0, 0]
        assert [reader.kind(number) for number in range(7)] == KINDS
        assert scores[[0, 4]].tolist() == [[1e-300, 0.2, 0.7], [0.1, -0.0, np.inf]]
        texts = [reader.text(number) for number in (2, 3, 6)]
        assert texts == ["the reason, ☃".encode(), b"{}", b""]
    again = ResultStore(tmp_path, 3)
    again.put(BadTextRow(1, "later"))
    assert (again.text(1), again.text(2)) == (b"later", "the reason, ☃".encode())


def test_every_changed_byte_is_noticed(store, tmp_path):
    for name, row in (("results", 4), ("results", 2), ("texts", 2)):
        path = tmp_path / name
        content = path.read_bytes()
        size = len((tmp_path / "results").read_bytes()) // 7
        begin, end = (row * size, (row + 1) * size) if name == "results" else (0, 16 + 15)
        for index in range(begin, end):
            changed = bytearray(content)
            changed[index] ^= 0x10
            path.write_bytes(changed)
            assert store.kind(row) == 0, (name, index)
        path.write_bytes(content)
        assert store.kind(row) != 0


def test_a_result_at_another_rows_place_is_noticed(store, tmp_path):
    path = tmp_path / "results"
    content = path.read_bytes()
    size = len(content) // 7
    path.write_bytes(content[size * 4 : size * 5] * 7)
    assert [store.kind(number) for number in range(7)] == [0, 0, 0, 0, SCORED, 0, 0]
