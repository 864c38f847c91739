"""Promise: the requests of `gpuscore bench` have the lengths of the reports, are the same for every
server, and never repeat what a cache could have kept."""

import json

import numpy as np
import pytest

from gpuscore.config import EngineConfig, ServerConfig
from gpuscore.errors import UsageError
from gpuscore.measure.apis import APIS
from gpuscore.measure.arguments import APIS as NAMED_APIS
from gpuscore.measure.arguments import SCENARIOS as NAMED
from gpuscore.measure.scenarios import (
    IN_FLIGHT,
    MARK,
    SCENARIOS,
    BenchRequest,
    Draws,
    text_scenario,
)
from gpuscore.measure.workload import SENTENCES

VOCAB = 5000


def requests(name, mode, number=0, seed=1):
    scenario = SCENARIOS[name]
    (chosen,) = [candidate for candidate in scenario.modes if candidate.name == mode]
    return Draws(seed, VOCAB).requests(scenario, chosen, number)


def test_the_command_line_names_them_all():
    assert tuple(SCENARIOS) == NAMED
    assert tuple(APIS) == NAMED_APIS


def test_a_default_server_admits_as_many_as_are_in_flight():
    assert ServerConfig().max_inflight_per_key >= max(IN_FLIGHT)
    assert EngineConfig().max_queued_requests >= max(IN_FLIGHT)


@pytest.mark.parametrize(
    ("name", "mode", "count", "query", "items", "item"),
    [
        ("rerank", "packed", 1, 2000, 500, 20),
        ("rerank", "sequential", 16, 2000, 32, 20),
        ("rerank", "single", 500, 2000, 1, 20),
        ("rerank-static", "warm", 1, 2020, 500, 20),
        ("rerank-short", "cold", 1, 1910, 500, 10),
        ("concurrency", "1 x 180, 128 in flight", 2000, 120, 1, 180),
        ("concurrency", "10 x 180, 1,024 in flight", 2000, 120, 10, 180),
        ("poisson", "Poisson 70/s", 8400, 120, 10, 180),
        ("latency", "scoring", 20, 120, 1, 180),
        ("setwise", "sets", 1, 2000, 100, 210),
        ("setwise", "single", 1000, 2000, 1, 21),
    ],
)
def test_lengths_are_those_of_the_reports(name, mode, count, query, items, item):
    scenario = SCENARIOS[name]
    (chosen,) = [candidate for candidate in scenario.modes if candidate.name == mode]
    assert chosen.sent == chosen.requests == count
    (some,) = [few for few in scenario.scaled(0.02).modes if few.name == mode]
    drawn = Draws(1, VOCAB).requests(scenario, some, 0)
    assert len(drawn) == some.sent
    assert {len(request.query) for request in drawn} == {query}
    assert len(drawn[0].items) == items
    assert {len(ids) for request in drawn for ids in request.items} == {item}


def test_sets_are_read_after_each_candidate():
    (drawn,) = requests("setwise", "sets")
    assert all(
        [place for place, id in enumerate(ids) if id == MARK] == [*range(20, 210, 21)]
        for ids in drawn.items
    )
    assert MARK not in drawn.query
    body = json.loads(APIS["score"].encode(drawn, "m"))
    assert body["score_extraction_token_id"] == MARK
    rows = [[[0.5, 0.25]] * 10] * 100
    assert len(APIS["score"].read(json.dumps({"scores": rows}).encode(), drawn)) == 1000
    with pytest.raises(ValueError, match="999 rows of scores"):
        APIS["score"].read(json.dumps({"scores": [*rows[1:], rows[0][1:]]}).encode(), drawn)


def test_nothing_is_drawn_twice_except_static_tokens():
    every = []
    for mode in ("packed", "sequential"):
        for number in (0, 1):
            every.append(requests("rerank", mode, number))
    queries = [tuple(drawn[0].query) for drawn in every]
    assert len({query[:100] for query in queries}) == 1, "the static tokens"
    assert len({query[100:120] for query in queries}) == 4
    items = [tuple(ids) for some in every for request in some for ids in request.items]
    assert len(items) == len(set(items)) == 2000
    cold = [requests("rerank-static", "cold", n)[0].query[:20] for n in (0, 1)]
    warm = [requests("rerank-static", "warm", n)[0].query for n in (0, 1)]
    assert cold[0] != cold[1]
    assert warm[0][:2000] == warm[1][:2000]
    assert warm[0][2000:] != warm[1][2000:]


def test_every_server_gets_the_same_and_every_seed_others():
    first, again, other = (requests("latency", "scoring", seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_arrivals_are_of_a_poisson_process():
    (mode,) = SCENARIOS["poisson"].modes
    times = Draws(3, VOCAB).arrivals(mode, 0)
    gaps = np.diff(times)
    assert len(times) == 8400
    assert gaps.mean() == pytest.approx(1 / 70, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_scale_leaves_out_requests_and_shortens_none():
    scenario = SCENARIOS["rerank"].scaled(0.1)
    sizes = {}
    for mode in scenario.modes:
        asks = Draws(1, VOCAB).requests(scenario, mode, 0)
        sizes[mode.name] = (len(asks), mode.requests, len(asks[0].items), len(asks[0].query))
    assert sizes == {
        "packed": (1, 1, 500, 2000),
        "sequential": (4, 16, 32, 2000),
        "single": (50, 500, 1, 2000),
    }
    (poisson,) = SCENARIOS["poisson"].scaled(0.1).modes
    assert (poisson.sent, poisson.requests) == (840, 8400)
    assert len(Draws(1, VOCAB).requests(SCENARIOS["poisson"], poisson, 0)) == 840
    assert SCENARIOS["poisson"].scaled(0.001).modes[0].sent == 70, "those of a second"


def test_texts_of_ones_own(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [{"query": f"q{n}", "items": [f"i{n}.{i}" for i in range(40)]} for n in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scenario = text_scenario(path)
    packed, sequential = (Draws(1, VOCAB).requests(scenario, mode, 0) for mode in scenario.modes)
    assert [len(request.items) for request in packed] == [40, 40]
    assert [len(request.items) for request in sequential] == [32, 8, 32, 8]
    assert packed[1] == BenchRequest("q1", lines[1]["items"])


def test_real_sentences_are_shipped():
    """24 questions with 10 sentences each, none of them twice; no request is worth dividing."""
    scenario = text_scenario(SENTENCES)
    assert [mode.name for mode in scenario.modes] == ["packed"]
    asks = Draws(1, VOCAB).requests(scenario, scenario.modes[0], 0)
    every = [item for ask in asks for item in ask.items]
    assert (len(asks), len(every), len(set(every))) == (24, 240, 240)
    assert all(isinstance(item, str) and item.endswith(".") for item in every)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}\n", "line 1: "), ('{"query": 1, "items": []}', "line 1: "), ("", "no line has items")],
)
def test_lines_that_are_none(text, said, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        text_scenario(path)
