"""Promise: within a part, rows that share a query, or that begin alike, go into one request
whatever their order, and memory does not grow with the rows."""

import random
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest

from gpuscore.commands.bulk.scoring import TextRow, grouped
from gpuscore.config import RequestLimits
from support import programs
from support.batch_jobs import check, encoder, fake_model, make_rows, read_jsonl, run, write_jsonl


def groups_of(texts, limits=None, cut=0, **backend):
    rows = [TextRow(*pair, 0, place) for place, pair in enumerate(texts)]
    random.Random(3).shuffle(rows)
    with fake_model(limits=limits, **backend) as model:
        builder = model.prompts.builder
        builder.backend = replace(builder.backend, deterministic_chunk=cut)
        groups = list(grouped(rows, model))
    assert sorted(row for group in groups for row in group) == sorted(rows)
    return sorted(sorted(row.place for row in group) for group in groups)


def test_rows_of_one_query_are_one_group():
    rows = [(f"q{i % 3}", f"i{i}") for i in range(30)]
    assert groups_of(rows) == [list(range(start, 30, 3)) for start in range(3)]
    assert max(map(len, groups_of(rows, RequestLimits(max_items=4)))) == 4


def test_rows_with_queries_of_their_own_are_put_together():
    rows = [("a", "1"), ("b", "1"), ("c", "1"), ("c", "2"), ("d", "1"), ("e", "1")]
    assert groups_of(rows) == [[0, 1, 4, 5], [2, 3]]


def test_with_a_fixed_cut_they_stay_apart():
    """The cut depends on the query, and with it the bits of a score."""
    rows = [("a", "1"), ("b", "1"), ("c", "1"), ("c", "2"), ("d", "1")]
    assert groups_of(rows, cut=16) == [[0], [1], [2, 3], [4]]


def test_rows_that_begin_alike_are_put_together():
    long = [letter * 400 for letter in "xyz"]
    rows = [("", long[i % 3] + str(i)) for i in range(9)]
    assert groups_of(rows) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    own = [(long[i % 3] + str(i), "item") for i in range(9)]
    assert groups_of(own) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert groups_of([("q", letter * 400) for letter in "xyzw"]) == [[0, 1, 2, 3]]


def test_a_request_is_a_few_batches_long():
    """Results of a slow machine come in steps of seconds."""
    groups = groups_of([("q", f"{i:04} " * 100) for i in range(100)], max_tokens=256)
    assert {len(group) for group in groups} == {4}


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
    run(source, output, lambda: fake_model(around, **backend))
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


def peaks_of(tmp_path, *counts):
    """Return the peaks of memory of jobs of so many rows, in MiB."""
    for count in counts:
        done = programs.run_module("support.batch_memory", tmp_path, count, seconds=1200)
        assert done.returncode == 0, done.stdout + done.stderr
        yield float(done.stdout.split("peak:")[1])


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """Parts hold 500 rows here."""
    few, many = peaks_of(tmp_path, 12_000, 36_000)
    assert many - few < 4


@pytest.mark.slow
def test_memory_does_not_grow_with_many_rows(tmp_path):
    few, many = peaks_of(tmp_path, 50_000, 400_000)
    assert many - few < 8
