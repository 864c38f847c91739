"""Promise: `gpuscore eval` reports the measures of the scores that the model gives, in process and
over HTTP, and goes on where it ended."""

import csv
import json
import re
import shlex
from pathlib import Path

import ir_measures
import pytest

from gpuscore import Scorer
from gpuscore.commands.cli import main
from gpuscore.config import ModelConfig
from gpuscore.measure.evaluation.command import DEMO
from gpuscore.measure.evaluation.data import read_lines
from gpuscore.measure.evaluation.targets import Target, file_name, run_target
from support.pages import compare_numbers
from support.serving import QUICK, serving

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "evaluate.md"
FAST = ("--threads", "1", "--max-batch-tokens", "512")


def run(*words):
    return main(["eval", "demo", *map(str, words), *FAST])


@pytest.fixture(scope="module")
def data():
    return read_lines(DEMO)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The first queries of the demo's data."""
    path = tmp_path_factory.mktemp("data") / "small.jsonl"
    path.write_text("".join(DEMO.read_text(encoding="utf-8").splitlines(True)[:6]))
    return path


@pytest.fixture(scope="module")
def target():
    return Target("demo", ModelConfig(threads=1, max_batch_tokens=512))


@pytest.fixture(scope="module")
def evaluated(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    assert run("--data", small, "--output", folder, "--price", 2) == 0
    return folder


def test_the_report_is_that_of_the_models_scores(evaluated, small):
    """Scores are computed by another way, and measures by ir_measures itself."""
    queries = read_lines(small).queries
    with Scorer("demo", threads=1) as scorer:
        rows = [
            scorer.score(f"query: {q.text}\nitem: ", list(q.texts), labels=["yes", "no"])
            for q in queries
        ]
    run_of = {
        q.id: dict(zip(q.documents, row.scores[:, 0].tolist(), strict=True))
        for q, row in zip(queries, rows, strict=True)
    }
    qrels = {q.id: dict(q.grades) for q in queries}
    expected = ir_measures.calc_aggregate([ir_measures.nDCG @ 10, ir_measures.AP], qrels, run_of)
    content = json.loads((evaluated / "report.json").read_text())["runs"]
    measures = content["demo"]["measures"]
    assert measures["nDCG@10"]["value"] == pytest.approx(expected[ir_measures.nDCG @ 10], abs=1e-6)
    assert measures["MAP"]["value"] == pytest.approx(expected[ir_measures.AP], abs=1e-6)
    assert content["demo"]["prompt_tokens"] == sum(row.prompt_tokens for row in rows)
    assert content["first stage"]["measures"]["nDCG@10"]["value"] < measures["nDCG@10"]["value"]


def test_the_page_loads_nothing_and_has_everything(evaluated):
    page = (evaluated / "report.html").read_text()
    assert not re.search(r"(src|href)=|<script", page)
    assert page.count("<svg") == 2
    for text in ("nDCG@10", "first stage", "price of 1,000 queries", "better", "hardware"):
        assert text in page
    rows = list(csv.DictReader((evaluated / "queries.csv").read_text("utf-8").splitlines()))
    assert len(rows) == 6
    content = json.loads((evaluated / "report.json").read_text())["runs"]["demo"]["measures"]
    mean = sum(float(row["MAP, demo"]) for row in rows) / 6
    assert mean == pytest.approx(content["MAP"]["value"], abs=1e-4)


class Stop(Exception):
    pass


def test_it_goes_on_where_it_ended(data, target, tmp_path):
    """The earlier run ended with an error, and its last line is cut off."""
    path = tmp_path / file_name(target, data)
    seen = []

    def five(count):
        seen.append(count)
        if len(seen) == 6:  # the first call is for what is known already
            raise Stop

    with pytest.raises(Stop):
        run_target(target, data, tmp_path, 2, five)
    kept = path.read_text().splitlines(keepends=True)
    assert 5 <= len(kept) < len(data.queries)
    marked = [json.loads(line) | {"tokens": 777} for line in kept[:-1]]
    path.write_text("".join(json.dumps(row) + "\n" for row in marked) + kept[-1][:-9])
    counts = []
    whole = run_target(target, data, tmp_path, 2, counts.append)
    assert counts[0] == 20 * len(marked)
    assert sum(counts) == data.pairs
    assert sum(answer.tokens == 777 for answer in whole.answers.values()) == len(marked)
    counts.clear()
    run_target(target, data, tmp_path, 1, counts.append)
    assert counts == [data.pairs]  # everything is known, what was cut off, too
    fresh = run_target(target, data, tmp_path / "fresh", 1, lambda count: None)
    for query in data.queries:
        got, expected = (scored.answers[query.id].scores for scored in (whole, fresh))
        assert got == pytest.approx(expected, abs=1e-5)
    assert 0 < whole.seconds <= sum(answer.seconds for answer in whole.answers.values())


def test_what_scores_depend_on_changes_the_file(data, target, small, tmp_path):
    other = Target("demo", ModelConfig(threads=1, max_batch_tokens=512, dtype="bfloat16"))
    asked = Target("demo", target.config, instruction="x")
    names = {file_name(variant, data) for variant in (target, other, asked)}
    assert len(names | {file_name(target, read_lines(small))}) == 4


def test_a_server_gives_the_same(evaluated, small, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUSCORE_API_KEY", "k")
    with serving("demo", *QUICK) as server:
        words = ["--data", str(small), "--output", str(tmp_path)]
        assert main(["eval", server.url, *words]) == 0
    ours, theirs = (
        json.loads((folder / "report.json").read_text())["runs"] for folder in (evaluated, tmp_path)
    )
    assert theirs[server.url]["measures"] == ours["demo"]["measures"]
    assert theirs[server.url]["prompt_tokens"] == ours["demo"]["prompt_tokens"]


@pytest.mark.slow
def test_another_precision_and_a_margin(small, tmp_path, capsys):
    words = ("--data", small, "--output", tmp_path, "--against", "dtype=bfloat16")
    assert run(*words, "--margin", 0.5) == 0
    shown = capsys.readouterr().out
    assert "demo, dtype bfloat16" in shown
    assert "not worse by more than 0.5" in shown


def test_a_loss_is_an_exit_code(tmp_path, capsys):
    """The first stage knows the grades here, so any model loses against it."""
    rows = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()[:8]]
    for row in rows:  # the grades are turned around, so that the model is wrong
        row["grades"] = [3 - grade for grade in row["grades"]]
        row["first_stage"] = row["grades"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("--data", path, "--output", tmp_path / "out", "--margin", 0.1) == 1
    shown = capsys.readouterr().out
    assert "worse (-" in shown
    assert "NOT shown to be not worse by more than 0.1" in shown


def test_classes(tmp_path, capsys):
    rows = [
        ("query: a lamp\nitem: A red lamp.", "yes"),
        ("query: a lamp\nitem: A blue chair.", "no"),
        ("query: a scarf\nitem: A wool scarf.", "yes"),
        ("query: a scarf\nitem: A lamp.", "yes"),  # wrong
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t, "label": la}) + "\n" for t, la in rows))
    words = ("--data", path, "--labels", "yes,no", "--output", tmp_path / "out")
    assert run(*words) == 0
    content = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]["demo"]["measures"]
    assert content["accuracy"]["value"] == 0.75
    with Scorer("demo", threads=1) as scorer:
        yes = scorer.classify([text for text, _ in rows], labels=["yes", "no"]).probabilities[:, 0]
    pairs = [yes[i] > yes[1] for i in (0, 2, 3)]
    assert content["AUC"]["value"] == pytest.approx(sum(pairs) / 3)


@pytest.mark.slow
def test_a_document_that_is_too_long_does_not_end_it(tmp_path, capsys):
    row = {"query": "a lamp", "documents": ["A lamp.", "word " * 5000], "grades": [1, 0]}
    whole = {"query": "word " * 5000, "documents": ["a", "b"], "grades": [1, 0]}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (row, whole)))
    assert run("--data", path, "--output", tmp_path / "out") == 0
    content = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]["demo"]
    assert content["not_scored"] == 3
    assert run("--data", path, "--output", tmp_path / "cut", "--truncate") == 0
    content = json.loads((tmp_path / "cut" / "report.json").read_text())["runs"]["demo"]
    assert content["not_scored"] == 2  # a query is never cut


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "/nowhere"), "--data /nowhere does not exist"),
        (("--data", "demo", "--run", "x"), "--run belongs to a folder"),
        (("--data", "demo", "--labels", "a,b"), "--labels belongs to texts with labels"),
        (("--data", "demo", "--against", "colour=red"), "colour is none of instruction, family"),
        (("--data", "demo", "--against", "dtype=float13"), "dtype"),
        (("--data", "demo", "--against", "demo"), "--against names demo twice"),
        (("--data", "demo", "--depth", "0"), "--depth and --concurrency must be at least 1"),
        (("--data", "demo", "--margin", "-1"), "--margin must not be negative"),
        (("--data", "demo", "--measures", "nDGC@10"), "there is no measure nDGC@10"),
    ],
)
def test_refusals(words, message, capsys, tmp_path):
    assert run(*words, "--output", tmp_path) == 78
    assert message in capsys.readouterr().err


def test_a_servers_settings_are_its_own(capsys, tmp_path):
    words = ["--data", "demo", "--output", str(tmp_path), "--against", "dtype=float32"]
    assert main(["eval", "http://127.0.0.1:9", *words]) == 78
    assert "a server's dtype cannot be set from here" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_shows_what_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    (command, *_), (shown, *_) = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("sh", "text")
    )
    program, *words = shlex.split(command)
    assert program == "gpuscore"
    assert main([*words, *FAST]) == 0
    lines = capsys.readouterr().out.splitlines()
    speed = next(i for i, line in enumerate(lines) if "queries/s" in line)
    kept = "\n".join([*lines[:speed], *lines[speed + 2 :]])  # without seconds of this machine
    compare_numbers(kept, shown)
