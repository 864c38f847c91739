"""Promise: `gpuscore batch` does what its page shows, tells what it refuses, and outlives its
engine. It says at its start that a column is missing or that the name of the scores is taken, and
ends with 1 if more rows are bad than --max-bad allows."""

import json
import os
import re
import shlex
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.commands.bulk import command
from gpuscore.commands.bulk.command import Progress, run_job
from gpuscore.commands.cli import main
from support import programs
from support.batch_jobs import (
    OUTPUTS,
    Killed,
    check,
    encoder,
    fake_model,
    make_rows,
    read_jsonl,
    read_output,
    run,
    served,
    stops_after,
    words,
    write_input,
    write_jsonl,
)
from support.serving import QUICK, children

BY_QUERY = ("--query-column", "query")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "score-a-file.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_shows_what_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs, shown, *_ = blocks("json")
    Path("pairs.jsonl").write_text(pairs)
    program, *shell = shlex.split(blocks("sh")[0])
    assert program == "gpuscore"
    done = programs.run(*shell, *QUICK)
    assert done.returncode == 1, done.stderr
    speed = re.compile(r"[\d.]+ s|[\d.]+ rows/s")
    assert speed.sub("", done.stdout) == speed.sub("", blocks("text")[0])
    scored, expected = read_jsonl(Path("scored.jsonl")), [*map(json.loads, shown.splitlines())]
    assert [row.pop("scores") for row in scored] == [
        pytest.approx(row.pop("scores"), abs=5e-4) for row in expected
    ]
    assert scored == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "out.csv"], "--output out.csv: for JSON lines it must end with .jsonl"),
        (["--output", "out.parquet"], "for JSON lines it must end with .jsonl"),
        (["--input", "none.jsonl"], "none.jsonl: No such file or directory"),
        (["--apply-softmax"], "--apply-softmax needs --labels"),
        (["--query-column", "item"], "--query-column and --item-column are both item"),
    ],
)
def test_refused_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    arguments = ["--input", "in.jsonl", "--output", "out.jsonl", *flags]
    assert main(["batch", *arguments]) == 78
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow
def test_a_lost_engine_loses_no_row_and_doubles_none(tmp_path):
    rows = make_rows(4000, queries=1000)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    job = words(source, output, *BY_QUERY)
    with programs.started(*job, module="support.batch_steps") as process:
        while not list(tmp_path.glob("out.jsonl.work/*.part")):
            assert process.poll() is None
            time.sleep(0.005)
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        assert process.wait(300) == 0
    rows = read_jsonl(output)
    assert [row["id"] for row in rows] == list(range(4000))
    again = tmp_path / "again.jsonl"
    assert programs.run(*words(source, again, *BY_QUERY)).returncode == 0
    for row, other in zip(rows, read_jsonl(again), strict=True):
        assert row["scores"] == pytest.approx(other["scores"], abs=1e-5)


@pytest.mark.slow
def test_an_engine_that_never_runs_is_exit_code_70(tmp_path):
    source, output = write_jsonl(tmp_path / "in.jsonl", make_rows(9)), tmp_path / "out.jsonl"
    job = words(source, output, *BY_QUERY)
    with programs.started(*job) as process:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            for engine in children(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGKILL)
            time.sleep(0.05)
        assert process.wait(1) == 70
    assert not output.exists()
    assert (tmp_path / "out.jsonl.work" / "job.state").exists()
    assert programs.run(*job).returncode == 0


ROWS = make_rows(30)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--item-column", "text"], " has no column text; it has ['id', 'query', 'item']"),
        (["--query-column", "text"], " has no column text; it has ['id', 'query', 'item']"),
        (["--scores-column", "id"], "has a column id already; choose another with --scores-column"),
    ],
)
def test_refused_with_the_columns_that_are_there(tmp_path, capsys, kind, flags, message):
    source = write_input(tmp_path, kind, ROWS)
    output = tmp_path / f"out.{OUTPUTS[kind]}"
    assert main(words(source, output, *flags)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(("place", "code"), [(1000, 2), (999, None), (2000, 2)])
def test_json_rows_are_searched_up_to_1000(tmp_path, capsys, place, code):
    rows = [{"text": "a"}] * 2000
    rows.insert(place, {"item": "b"})
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    if code is None:
        outcome = run(source, tmp_path / "out.jsonl", query_column=None)
        assert outcome == (1, 2000)
        return
    assert main(words(source, tmp_path / "out.jsonl")) == code
    assert "(its first 1000 rows) has no column item; it has ['text']" in capsys.readouterr().err


def test_names_of_columns_are_told_in_one_short_line(tmp_path, capsys):
    row = {"a\n\x1b[31m": 1} | {f"column {index}": 1 for index in range(500)}
    assert main(words(write_jsonl(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl")) == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), "\x1b" in told) == (1, False)
    assert told.endswith("...\n")


def test_rows_that_are_no_objects_have_no_columns_to_tell(tmp_path):
    outcome = run(write_jsonl(tmp_path / "in.jsonl", [b"{", b"7"]), tmp_path / "out.jsonl")
    assert outcome == (0, 2)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_scores_get_another_name(tmp_path, kind):
    rows = [{**row, "scores": "mine"} for row in ROWS]
    output = tmp_path / f"out.{OUTPUTS[kind]}"
    run(write_input(tmp_path, kind, rows), output, scores_column="p")
    rows = read_output(output)
    assert list(rows[0]) == ["id", "query", "item", "scores", "p"]
    assert {row["scores"] for row in rows} == {"mine"}
    check(ROWS, [row["p"] for row in rows])


def test_a_late_row_with_a_field_of_that_name_is_bad(tmp_path):
    """Rows are read one after the other, so only the first ones can be refused at the start."""
    rows = make_rows(1200)
    rows.insert(1100, {**rows[0], "scores": 7})
    output = tmp_path / "out.jsonl"
    outcome = run(write_jsonl(tmp_path / "in.jsonl", rows), output)
    assert outcome == (1200, 1)
    (bad,) = read_jsonl(tmp_path / "out.jsonl.bad.jsonl")
    assert (bad["line"], json.loads(bad["input"])["scores"]) == (1101, 7)
    assert bad["reason"] == "there is a field scores already"
    check(
        [row for row in rows if "scores" not in row], [row["scores"] for row in read_jsonl(output)]
    )


@pytest.fixture
def ended(tmp_path, capsys, monkeypatch):
    """Return a function that runs the command with the fake backend: its exit code, lines and
    errors."""

    def run_fake(options, settings, _, progress):
        run_job(options, settings, served(fake_model), progress)

    monkeypatch.setattr(command, "run_job", run_fake)

    def run_to_end(*words):
        code = main(words)
        output, told = capsys.readouterr()
        *said, loaded, last = output.splitlines()
        assert re.fullmatch(r"model loaded in \d+\.\d s", loaded)
        assert re.fullmatch(r"rows scored in \d+\.\d s: \d+, \d+\.\d rows/s", last), told
        return code, [line.replace(f"{tmp_path}/", "") for line in said], told

    return run_to_end


@pytest.mark.parametrize(
    ("bad", "flags", "code"),
    [
        (30, [], 1),
        (30, ["--max-bad", "1"], 1),
        (1, [], 1),
        (1, ["--max-bad", "0.04"], 0),
        (0, ["--max-bad", "0"], 0),
    ],
)
def test_the_exit_code_tells_of_bad_rows(ended, tmp_path, bad, flags, code):
    rows = [{**row, "item": None} if index < bad else row for index, row in enumerate(ROWS)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    ended_with, said, told = ended(*words(source, tmp_path / "out.jsonl", *flags))
    assert ended_with == code
    refused = [f"bad rows in out.jsonl.bad.jsonl: {bad}"] if bad else []
    assert said == [f"rows in out.jsonl: {30 - bad}", *refused]
    share = "0.04" if "0.04" in flags else flags[-1] if flags else "0.01"
    assert (f"{bad} of 30 rows are bad; --max-bad is {share}" in told) == (code == 1)
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 30 - bad
    assert not (tmp_path / "out.jsonl.work").exists()


def test_requests_answered_with_an_error_count_as_bad(ended, tmp_path):
    body = {"query": "a", "items": ["b"], "labels": ["yes"]}
    lines = [
        {"custom_id": str(index), "method": "POST", "url": url, "body": body}
        for index, url in enumerate(["/v1/score"] * 3 + ["/v1/nowhere"])
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    asked = ["batch", "demo", "--requests", "--input", str(source), *QUICK]
    for share, code in (("0.25", 0), ("0.24", 1)):
        output = ["--output", str(tmp_path / f"{share}.jsonl")]
        ended_with, said, told = ended(*asked, *output, "--max-bad", share)
        assert ended_with == code
        assert said == [f"rows in {share}.jsonl: 4", "answers with an error: 1"]
        assert ("1 of 4 rows are bad" in told) == (code == 1)
        assert len(read_jsonl(tmp_path / f"{share}.jsonl")) == 4


def test_requests_for_several_rows_of_a_text(tmp_path):
    """They get what Scorer returns."""
    query, items = "query: a lamp\n", ["A blue lamp.\nA red rug.\n", "It.\n"]
    prompt, ids = [5, 6, 7, 8], [[3, 9], [], [4]]
    bodies = {
        "/v1/score": {"query": query, "items": items, "labels": ["yes", "no"]}
        | {"score_extraction_token": ".\n"},
        "/v1/completions": {"prompt": prompt, "max_tokens": 0, "echo": True}
        | {"prompt_logprob_token_ids": ids},
    }
    lines = [
        {"custom_id": url, "method": "POST", "url": url, "body": body}
        for url, body in bodies.items()
    ]
    source, output = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    asked = ["--requests", "--input", str(source), "--output", str(output)]
    assert programs.run("batch", "demo", *asked, *QUICK).returncode == 0
    scored, completed = (line["response"]["body"] for line in read_jsonl(output))
    (token,) = encoder().plain_ids(".\n").tolist()
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        rows = scorer.score(query, items, labels=["yes", "no"], extraction_token_id=token)
        after = scorer.logprobs(prompt, ids)
    assert [*map(len, scored["scores"])] == np.diff(rows.offsets).tolist() == [2, 1]
    np.testing.assert_allclose(np.concatenate(scored["scores"]), rows.scores, rtol=1e-5)
    (choice,) = completed["choices"]
    for got, expected in zip(choice["prompt_token_id_logprobs"], after, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("share", ["2", "-0.1", "nan", "1%"])
def test_a_share_is_from_0_to_1(tmp_path, capsys, share):
    try:
        code = main(words(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--max-bad", share))
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "must be a number from 0 to 1" in capsys.readouterr().err


def test_the_rate_is_of_scoring_alone(tmp_path):
    """Loading is told apart, and rows that an earlier run has scored took no time of this one."""

    @contextmanager
    def loading():
        time.sleep(0.5)
        with fake_model() as model:
            yield model

    source = write_jsonl(tmp_path / "in.jsonl", [{"item": None}, *ROWS])
    first, second = Progress(), Progress()
    with pytest.raises(Killed):
        run(source, tmp_path / "out.jsonl", stops_after(4), progress=first)
    run(source, tmp_path / "out.jsonl", loading, progress=second)
    assert first.scored + second.scored == first.rows == second.done == 31
    assert first.scored
    assert second.loading > 0.5 > second.scoring > 0
