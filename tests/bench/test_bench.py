"""Promise: `gpuscore bench` times only right scores, over every API, and says in one line what a
server refuses, loses or gets wrong."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.commands.cli import main
from gpuscore.measure.bundle import read_bundle, write_bundle
from gpuscore.measure.targets import started
from support import programs
from support.known_answers import scores
from support.serving import QUICK, serving

LEAST = ("--minutes", "0.001", "--scale", "0.002", "--bench-seed", "5")


@pytest.fixture(scope="module")
def server():
    """A server that refuses requests of 500 items."""
    with serving("demo", *QUICK, "--no-log-requests", "--max-items", "100") as running:
        yield running


@pytest.fixture
def generous():
    with serving("demo", *QUICK, "--no-log-requests") as running:
        yield running


@pytest.fixture(scope="module")
def sampled(server, tmp_path_factory):
    """The bundle of one run, in a folder of its own."""
    folder = tmp_path_factory.mktemp("sampled")
    run(folder, "--url", server.url, "--scenario", "latency")
    return folder / "found.json"


def run(tmp_path, *words, code=0):
    """Run the command; return the bundle and its rows by scenario and way."""
    path = tmp_path / "found.json"
    assert main(["bench", *LEAST, "--output", str(path), *map(str, words)]) == code
    bundle = read_bundle(path)
    return bundle, {(row.scenario, row.way): row for row in bundle.rows}


@pytest.mark.slow
def test_all_ways_of_a_server(generous, tmp_path, capsys):
    page = tmp_path / "page.html"
    names = "rerank,latency,poisson"
    words = ("--scenario", names, "--rate", "50%", "--report", page)
    bundle, rows = run(tmp_path, "--url", generous.url, *words)
    printed = capsys.readouterr().out
    assert {way for scenario, way in rows if scenario == "rerank"} == {
        "packed",
        "sequential",
        "single",
    }
    for row in rows.values():
        assert row.error is None, row
        assert row.rate.value > 0
        assert len(row.latencies) >= len(row.rates) >= 1
    assert "over sequential" in printed
    assert "rerank, " not in printed
    assert "packed" in printed
    assert f"single, {generous.url}: 4 of 500 requests" in printed
    ((name, poisson),) = [(way, row) for (scenario, way), row in rows.items() if "Poisson" in way]
    assert name.startswith("Poisson ")
    total = round(120 * float(name.removeprefix("Poisson ").removesuffix("/s")))
    assert f" of {total:,} requests were sent" in poisson.notes[0]
    assert poisson.late >= 0
    (facts,) = [server.facts for server in bundle.servers]
    assert facts["machine"]["cores"]
    assert facts["versions"]["gpuscore"]
    assert facts["settings"]["threads"] == 1
    assert "over sequential" in page.read_text()


def test_the_sample_is_that_of_the_model(sampled):
    """The bundle's scores are what the prompts get alone, by another way."""
    (judged,) = read_bundle(sampled).servers
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        for case in judged.workload.cases:
            expected = [
                scorer.score(prompt, [[]], label_token_ids=case.label_ids[0]).scores[0]
                for prompt in case.prompt_ids()[::3]
            ]
            got = np.exp(judged.results[case.name].values[::3])
            np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_the_sample_is_judged_by_the_oracle_too(sampled, tmp_path, monkeypatch, capsys):
    """A bundle of `parity record --oracle` is a reference; one of another workload is none."""
    monkeypatch.chdir(tmp_path)
    bundle = read_bundle(shutil.copy(sampled, Path("found.json")))
    record = ["parity", "record", "demo", "--dtype", "float32", *QUICK]
    assert main([*record, "--workload", "bench", "--oracle", "-o", "right"]) == 0
    monkeypatch.setattr("gpuscore.measure.workload.QUERIES", 2)
    assert main([*record, "--workload", "quick", "-o", "other"]) == 0
    files = ["bench", "compare", "found.json"]
    capsys.readouterr()
    assert main([*files, "--reference", "right"]) == 0
    assert "ok    found against right, float32: max |d log p|" in capsys.readouterr().out
    assert main([*files, "other"]) == 0
    said = "scores: skipped, because the workloads are bench, seed 0, of 1,792 token ids, and quick"
    assert f"skip  other against found, {said}" in capsys.readouterr().out
    (judged,) = bundle.servers
    wrong = {k: replace(v, values=v.values + 0.01) for k, v in judged.results.items()}
    servers = (replace(judged, results=wrong),)
    write_bundle(Path("found.json"), replace(bundle, servers=servers))
    assert main([*files, "--reference", "right"]) == 1
    assert main([*record, "--workload", "bench", "--seed", "1", "-o", "x"]) == 78
    assert "draws token ids" in capsys.readouterr().err


@pytest.mark.slow
def test_servers_of_its_own(tmp_path, capsys):
    """Two servers of one model agree."""
    options = " ".join(QUICK)
    words = ("--model", "demo", "--scenario", "latency")
    again = ("--serve", options, "--serve", f"{options} --no-prefix-cache")
    bundle, _ = run(tmp_path, *words, *again)
    assert len(bundle.servers) == 2
    assert "agrees with" in capsys.readouterr().out


def leaking(rows):
    """Let packed items leak: each one's score is a little nearer to its neighbour's."""
    return [
        [0.8 * a + 0.2 * b for a, b in zip(score, neighbour, strict=True)]
        for score, neighbour in zip(rows, rows[1:] + rows[:1], strict=True)
    ]


def test_wrong_scores_have_no_time(answering, tmp_path, capsys):
    url = answering(partial(scores, change=leaking))
    _, rows = run(tmp_path, "--url", url, "--scenario", "rerank", code=1)
    assert rows["rerank", "packed"].error.startswith("wrong scores: ")
    assert not rows["rerank", "packed"].rates
    assert "wrong scores: absolute: max |d log p|" in capsys.readouterr().out


def test_apis_that_score_one_label_are_asked_for_each(answering, tmp_path, capsys):
    found = []
    for api in ("score", "generative"):
        words = ("--url", answering(scores), "--api", api, "--scenario", "rerank-short")
        bundle, rows = run(tmp_path, *words)
        assert all(row.rates for row in rows.values())
        found.append({n: r.values.tolist() for n, r in bundle.servers[0].results.items()})
    assert found[0] == found[1]


def test_another_models_scores_are_told(answering, tmp_path, capsys):
    third = partial(scores, change=lambda rows: [[0.3 * p for p in row] for row in rows])
    urls = [answering(scores), answering(third)]
    words = ("--url", urls[0], "--url", urls[1], "--scenario", "rerank-short")
    run(tmp_path, *words, code=1)
    assert f"{urls[1]} DIFFERS from {urls[0]}: absolute" in capsys.readouterr().out


def test_a_refusal_stands_in_its_row_in_the_servers_words(server, tmp_path):
    words = ("--scenario", "rerank-short,latency")
    _, rows = run(tmp_path, "--url", server.url, *words, code=1)
    assert "status 400: 500 items" in rows["rerank-short", "warm"].error
    assert rows["latency", "scoring"].error is None


def test_a_server_that_dies_in_the_middle(answering, tmp_path):
    left = iter(range(200))
    url = answering(lambda body: None if next(left, None) is None else scores(body))
    words = ("--scenario", "latency", "--scale", "1", "--minutes", "1")
    _, rows = run(tmp_path, "--url", url, *words, code=1)
    assert "requests failed: the connection ended" in rows["latency", "scoring"].error


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(generous, tmp_path):
    path = tmp_path / "found.json"
    words = ["--scenario", "latency,rerank", "--minutes", "9", "--output", str(path)]
    process = subprocess.Popen(
        [programs.COMMAND, "bench", "--url", generous.url, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("latency: a round takes"):
            break
    process.send_signal(signal.SIGINT)
    try:
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, out
    bundle = read_bundle(path)
    assert bundle.facts["interrupted"] is True
    assert any(row.rates for row in bundle.rows)


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ([], "nothing to time", 2),
        (["--url", "http://127.0.0.1:9"], "no answer", 2),
        (["--url", "ftp://x"], "unsupported protocol", 2),
        (["--url", "127.0.0.1:80"], "--url 127.0.0.1:80: ", 2),
        (["--url", "http://"], "--url http://: ", 2),
        (["--url", "http://x:port"], "--url http://x:port: Invalid port", 2),
        (["--model", "demo", "--scenario", "a"], "--scenario a: there are rerank", 2),
        (["--serve", "--x", "--url", "http://127.0.0.1:9"], "needs --model", 2),
        (["--serve", "--threads=0", "--model", "demo"], "did not start: --threads must be", 78),
        (["--model", "demo", "--input", "/no/such"], "--input /no/such", 2),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(words, said, code, capsys):
    words = [f"--serve={words[1]}", *words[2:]] if words[:1] == ["--serve"] else words
    assert main(["bench", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_server_that_it_starts_has_the_time_that_the_client_waits(monkeypatch):
    def start(command, text, **streams):
        assert command[:2] == [sys.executable, "-m"]
        return programs.start(command[2], command[3:], **streams)

    monkeypatch.setattr("gpuscore.measure.targets.subprocess.Popen", start)
    items = [[i % 400, i // 400, *[3] * 18] for i in range(1200)]
    body = {"query": [1, 2], "items": items, "label_token_ids": [4]}
    with started("demo", " ".join(QUICK), patience=0.1) as url:
        answer = httpx.post(f"{url}/v1/score", json=body, timeout=60)
    assert (answer.status_code, "after 0.1 seconds" in answer.text) == (504, True), answer.text
