"""Promise: a job that was killed at any moment is continued by the same command, with the same bits
as if it had not been killed; a changed input or option, or a second run beside it, is refused."""

import fcntl
import os
import signal
import time

import numpy as np
import pytest
from pyarrow import parquet

from gpuscore import Scorer
from gpuscore.commands.cli import main
from gpuscore.errors import ConfigError
from support import programs
from support.batch_jobs import (
    Killed,
    check,
    fake_model,
    make_rows,
    read_jsonl,
    run,
    stops_after,
    words,
    write_jsonl,
)

ROWS = make_rows(25, queries=5)
ROWS[3]["item"] = None


def unfinished(tmp_path, **words):
    """Leave a job whose rows are read and not scored."""
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(Killed):
        run(source, tmp_path / "out.jsonl", stops_after(0), **words)
    return source, tmp_path / "out.jsonl"


@pytest.mark.parametrize(
    ("after", "step"),
    [
        ("jsonl", 23),
        pytest.param("jsonl", 1, marks=pytest.mark.slow),
        pytest.param("parquet", 1, marks=pytest.mark.slow),
    ],
)
def test_killed_before_any_change_to_the_disk(tmp_path, after, step):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    folder = tmp_path / "sweep"
    folder.mkdir()
    done = programs.run_module("support.batch_sweep", folder, source, f"out.{after}", step)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split("kills: ")[1]) > 50 // step
    assert len(read_jsonl(folder / "whole" / f"out.{after}.bad.jsonl")) == 1


def killed_command(job, work, seconds):
    """Start the command, kill it some seconds after its first results; return False if it ended."""
    with programs.started(*job) as process:
        results = work / "results"
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            if seconds < 0 or (results.exists() and results.stat().st_size):
                time.sleep(abs(seconds))
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        return process.wait() != 0


def command(source, output, *flags):
    return words(source, output, "--query-column", "query", *flags)


def test_the_command_killed_while_it_scores(tmp_path, capsys):
    """It does not go on with other settings, and goes on with the same ones."""
    rows = make_rows(300, queries=40)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    job, work = command(source, output), tmp_path / "out.parquet.work"
    assert killed_command(job, work, 0.0), "it was not killed in time"
    assert work.exists()
    assert not output.exists()
    for changed, message in (
        (["--dtype", "float32"], "--dtype was auto when this job began and is float32"),
        (["--threads", "2"], "--threads was 1 when this job began and is 2"),
        (["--family", "none"], "--family was auto when this job began and is none"),
        (["--max-items", "7"], "--max-items was 10000 when this job began and is 7"),
    ):
        assert main([*job, *changed]) == 78  # at once: no model is loaded
        assert message in capsys.readouterr().err
    done = programs.run(*job, "--load-timeout", "1700")
    assert (done.returncode, work.exists()) == (0, False), done.stderr
    written = parquet.read_table(output).to_pylist()
    assert [row["id"] for row in written] == list(range(300))
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        prompts = [row["query"] + row["item"] for row in rows]
        expected = scorer.score("", prompts, labels=["yes", "no"]).scores
    np.testing.assert_allclose([row["scores"] for row in written], expected, atol=1e-5)


@pytest.mark.slow
def test_the_command_killed_often_gives_the_same_bits(tmp_path):
    """Moments that are negative count from the start, others from the first result."""
    rows = make_rows(3000, queries=40)
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    whole, output = tmp_path / "whole.parquet", tmp_path / "killed.parquet"
    assert programs.run(*command(source, whole, "--deterministic")).returncode == 0
    job, work = command(source, output, "--deterministic"), tmp_path / "killed.parquet.work"
    for seconds in (-0.4, 0.0, -0.8, 0.1, -1.2, 0.2, 0.3):
        assert killed_command(job, work, seconds), "it was not killed in time"
        assert work.exists() or seconds < 0
        assert not output.exists()
    done = programs.run(*job)
    assert (done.returncode, work.exists()) == (0, False), done.stderr
    assert whole.read_bytes() == output.read_bytes()


def test_rows_that_are_scored_are_not_scored_again(tmp_path):
    rows = make_rows(300, queries=60)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        run(source, output, stops_after(40))
    seen = []

    def counted(engine):
        score_all = engine.score_all

        def count(requests):
            seen.extend(len(request.item_ids) for request in requests)
            return score_all(requests)

        engine.score_all = count
        return engine

    run(source, output, lambda: fake_model(counted))
    assert 80 < sum(seen) < 200
    check(rows, [row["scores"] for row in read_jsonl(output)])


def test_a_changed_input_is_refused(tmp_path):
    source, output = unfinished(tmp_path)
    old = source.read_bytes()
    source.write_bytes(old + b"{}\n")
    with pytest.raises(ConfigError, match=f"had {len(old)} bytes and has {len(old) + 3}; remove"):
        run(source, output)
    source.write_bytes(old.replace(b"blue", b"pink"))
    os.utime(source, ns=(0, 0))
    with pytest.raises(ConfigError, match="another SHA-256"):
        run(source, output)
    source.write_bytes(old)  # the same content at another time is the same input
    os.utime(source, ns=(0, 0))
    run(source, output)


def test_a_change_that_keeps_size_and_time_is_found_before_the_output_appears(tmp_path):
    source, output = unfinished(tmp_path)
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"blue", b"pink"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ConfigError, match="another SHA-256"):
        run(source, output)
    assert not output.exists()


def test_another_file_in_the_folder_is_refused(tmp_path):
    folder = tmp_path / "table"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS)
    with pytest.raises(Killed):
        run(folder, tmp_path / "out.jsonl", stops_after(0))
    write_jsonl(folder / "b.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"files of --input changed: b\.jsonl"):
        run(folder, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ("no", "yes")}, "--labels was yes,no when this job began and is no,yes"),
        ({"query_column": None}, "--query-column was query .* and is not set"),
        ({"apply_softmax": False}, "--apply-softmax was True .* and is False"),
        ({"temperature": 2.0}, r"--temperature was 1\.0 .* and is 2\.0"),
        (
            {"labels": None, "label_sequences": ((12, 7), (9,))},
            "--labels was yes,no .* and is not set",
        ),
        (
            {"label_length_normalization": "mean"},
            "--label-length-normalization was none .* and is mean",
        ),
        ({"settings": {"--dtype": "float32"}}, "--dtype was auto .* and is float32"),
    ],
)
def test_a_changed_option_is_refused(tmp_path, change, message):
    source, output = unfinished(tmp_path, settings={"--dtype": "auto"})
    with pytest.raises(ConfigError, match=message) as caught:
        run(source, output, **({"settings": {"--dtype": "auto"}} | change))
    assert f"remove {tmp_path / 'out.jsonl.work'} to begin anew" in str(caught.value)


def test_a_second_run_is_refused(tmp_path):
    source, output = unfinished(tmp_path)
    with open(tmp_path / "out.jsonl.work" / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is writing it"):
            run(source, output)
    run(source, output)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.bad.jsonl"])
def test_nothing_is_overwritten(tmp_path, name):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=f"{name} exists already"):
        run(source, tmp_path / "out.jsonl")
    assert (tmp_path / name).read_text() == "precious"
    assert not (tmp_path / "out.jsonl.work").exists()


def test_results_that_did_not_reach_the_disk_are_computed_again(tmp_path):
    """Places that were written hold zeros, as after a loss of power."""
    rows = make_rows(300, queries=60)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        run(source, output, stops_after(40))
    results = tmp_path / "out.jsonl.work" / "results"
    content = bytearray(results.read_bytes())
    assert sum(content) > 0
    for begin in range(0, len(content), 64):
        content[begin : begin + 32] = bytes(len(content[begin : begin + 32]))
    results.write_bytes(content)
    run(source, output)
    check(rows, [row["scores"] for row in read_jsonl(output)])


@pytest.mark.parametrize("damage", ["results", "texts"])
def test_a_damaged_work_folder_is_refused(tmp_path, damage):
    """The bad row was found by the first run, which is not repeated."""
    source, output = unfinished(tmp_path)
    os.truncate(tmp_path / "out.jsonl.work" / damage, 3)
    with pytest.raises(ConfigError, match="work is damaged: row 4 of all has no result; remove it"):
        run(source, output)
