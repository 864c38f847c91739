"""Promise: `gpuscore batch` does what its page shows, tells what it refuses, and outlives its
engine."""

import fcntl
import json
import os
import re
import shlex
import signal
import struct
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gpuscore.commands.bulk.job import Progress
from gpuscore.commands.cli import main
from support import programs
from support.batch_jobs import make_rows, read_jsonl, run, words, write_jsonl
from support.serving import QUICK, children
from support.terminal import on_terminal

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
    speed = re.compile(r"[\d.]+ s, [\d.]+ rows/s")
    assert speed.sub("", done.stdout) == speed.sub("", blocks("text")[0])
    found, want = read_jsonl(Path("scored.jsonl")), [*map(json.loads, shown.splitlines())]
    assert [row.pop("scores") for row in found] == [
        pytest.approx(row.pop("scores"), abs=5e-4) for row in want
    ]
    assert found == want


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "out.csv"], "--output out.csv: the name must end with .jsonl or .parquet"),
        (["--input", "none.jsonl"], "--input none.jsonl: there is no such file or folder"),
        (["--item-first"], "--item-first needs --labels"),
        (["--label-length-normalization", "mean"], "--label-length-normalization needs --labels"),
        (["--labels", "yes", "--instruction", "x"], "--instruction is for prompt families"),
        (["--query-column", "item"], "--query-column and --item-column are both item"),
        (["--ray", "auto"], "--ray needs Ray: pip install 'gpuscore[ray]'"),
        (["--ray-actors", "2"], "--ray-actors needs --ray"),
    ],
)
def test_refused_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    given = ["--input", "in.jsonl", "--output", "out.jsonl", *flags]
    assert main(["batch", *given]) == 78
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow
def test_a_strict_job_ends_with_1(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"item": None}])
    done = programs.run(*words(source, tmp_path / "out.jsonl", "--strict"))
    assert done.returncode == 1
    assert "in.jsonl, row 1: item is null, not text" in done.stderr


@pytest.mark.slow
def test_a_lost_engine_loses_no_row_and_doubles_none(tmp_path):
    rows = make_rows(4000, queries=1000)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with programs.started(*words(source, output, *BY_QUERY)) as process:
        results = tmp_path / "out.jsonl.work" / "results"
        while not (results.exists() and results.stat().st_size):
            assert process.poll() is None
            time.sleep(0.005)
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        assert process.wait(300) == 0
    found = read_jsonl(output)
    assert [row["id"] for row in found] == list(range(4000))
    again = tmp_path / "again.jsonl"
    assert programs.run(*words(source, again, *BY_QUERY)).returncode == 0
    for one, two in zip(found, read_jsonl(again), strict=True):
        assert one["scores"] == pytest.approx(two["scores"], abs=1e-5)


def test_a_progress_bar_with_rate_time_left_and_cache_share(tmp_path, monkeypatch):
    """The bar is shown on a terminal only."""
    source = write_jsonl(tmp_path / "in.jsonl", make_rows(300, queries=20))
    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        run(source, tmp_path / "out.jsonl", progress=Progress())
        terminal.flush()
        shown = os.read(parent, 2**16).decode()
    os.close(parent)
    assert re.search(r"reading: 300row \[00:\d\d, [\d.]+row/s\]", shown)
    assert re.search(
        r"scoring: 100%\|█+\| 300/300 \[00:\d\d<00:\d\d, +[\d.]+row/s, cached 5\d%\]", shown
    )
    assert re.search(r"writing: 100%\|█+\| 300/300 ", shown)


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
    assert (tmp_path / "out.jsonl.work" / "job.json").exists()
    assert programs.run(*job).returncode == 0


def test_the_engines_lines_go_past_the_bars(tmp_path):
    """They are text, and each replaces the bar in whose line it would stand."""
    source = tmp_path / "rows.jsonl"
    write_jsonl(source, make_rows(50))
    with on_terminal(*words(source, tmp_path / "scored.jsonl")) as (process, screen):
        assert process.wait(60) == 0
    assert "scoring: 100%" in screen.text
    assert '"message"' not in screen.text
    (before,) = re.findall(r"(.{4})\d\d:\d\d:\d\d info: memory: ", screen.text, re.DOTALL)
    assert before == "\r\x1b[K"
