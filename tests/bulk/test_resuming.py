"""Promise: a job that was killed at any moment is continued by the same command, with the same bits
as if it had not been killed; a changed input or option, or a second run beside it, is refused."""

import fcntl
import os
import re
import signal
import tempfile
import time
from pathlib import Path

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
    write_input,
    write_jsonl,
)
from support.slow import slow

ROWS = make_rows(25, queries=5)
ROWS[3]["item"] = None


def unfinished(tmp_path, **words):
    """Leave a job whose rows are read and not scored."""
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(Killed):
        run(source, tmp_path / "out.jsonl", stops_after(0), **words)
    return source, tmp_path / "out.jsonl"


@pytest.mark.parametrize(("after", "step"), [("jsonl", 4), *slow(("jsonl", 1), ("parquet", 1))])
def test_killed_before_any_change_to_the_disk(tmp_path, after, step):
    source = write_input(tmp_path, after, ROWS)
    folder = tmp_path / "sweep"
    folder.mkdir()
    done = programs.run_module("support.batch_sweep", folder, source, f"out.{after}", step)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split("kills: ")[1]) > 24 // step
    assert len(read_jsonl(folder / "whole" / f"out.{after}.bad.jsonl")) == 1


def ended_by(number, job, work, parts):
    """Start the command, end it by a signal once it has kept so many parts; return its code and
    what it said."""
    with tempfile.TemporaryFile("w+") as said:
        process = programs.start("support.batch_steps", job, stdout=said, stderr=said)
        try:
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:
                if parts <= len(list(work.glob("*.part"))):
                    break
                time.sleep(0.005)
            process.send_signal(number)
            code = process.wait(60)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return code, said.read()


def command(source, output, *flags):
    return words(source, output, "--query-column", "query", *flags)


@pytest.mark.parametrize("same", [[], *slow(["--deterministic"])])
def test_the_command_killed_twice_loses_and_doubles_nothing(tmp_path, capsys, same):
    """It does not go on with other settings, and goes on with the same ones, to the same bits if it
    is asked for them."""
    rows = make_rows(400, queries=4)
    source, output = write_input(tmp_path, "parquet", rows), tmp_path / "out.parquet"
    flags = [*same, "--load-timeout"]
    job, work = command(source, output, *flags, "600"), tmp_path / "out.parquet.work"
    for parts in (1, 4):
        assert ended_by(signal.SIGKILL, job, work, parts)[0] != 0, "it was not killed in time"
        assert work.exists()
        assert not output.exists()
    for changed, message in (
        (["--dtype", "bfloat16"], "--dtype was auto when this job began and is bfloat16"),
        (["--threads", "2"], "--threads was 1 when this job began and is 2"),
        (["--family", "none"], "--family was auto when this job began and is none"),
        (["--max-items", "7"], "--max-items was 10000 when this job began and is 7"),
    ):
        assert main([*job, *changed]) == 78  # at once: no model is loaded
        assert message in capsys.readouterr().err
    again = command(source, output, *flags, "500")
    done = programs.run_module("support.batch_steps", *again)
    assert (done.returncode, work.exists()) == (0, False), done.stderr
    assert re.search(r"resuming at \d{3} of 400 rows", done.stderr)
    if same:
        whole = command(source, tmp_path / "whole.parquet", *same)
        assert programs.run_module("support.batch_steps", *whole).returncode == 0
        assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    written = parquet.read_table(output).to_pylist()
    assert [row["id"] for row in written] == list(range(400))
    with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
        prompts = [row["query"] + row["item"] for row in rows[:50]]
        expected = scorer.score("", prompts, labels=["yes", "no"]).scores
    np.testing.assert_allclose([row["scores"] for row in written[:50]], expected, atol=1e-5)


@pytest.mark.parametrize(("most", "begun"), [(12_000, True), *slow((500, False))])
def test_a_full_disk_is_one_line_and_the_job_goes_on(tmp_path, most, begun):
    """The state of the job fits, and the output does not; or not even the state."""
    rows = make_rows(150, queries=10)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    job = command(source, output, "--compile", "off")
    done = programs.run_module("support.batch_steps", *job, FILE_BYTES=str(most))
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last == "gpuscore: the output cannot be written: File too large"
    assert "Traceback" not in done.stderr
    assert not output.exists()
    assert (tmp_path / "out.jsonl.work").exists() == begun
    done = programs.run_module("support.batch_steps", *job)
    assert (done.returncode, "resuming at 150 of 150" in done.stderr) == (0, begun)
    assert [row["id"] for row in read_jsonl(output)] == list(range(150))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    assert main(command(source, Path("/sys/out.jsonl"))) == 78
    told = capsys.readouterr().err
    assert re.fullmatch(r"gpuscore: --output /sys/out\.jsonl: /sys/out\.jsonl\.work: .+\n", told)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_command_says_where(tmp_path, number, code):
    """Into a file, too, as it tells of its progress: rows, rows per second, the time left."""
    rows = make_rows(1000, queries=40)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    job, work = command(source, output), tmp_path / "out.jsonl.work"
    ended, said = ended_by(number, job, work, 2)
    assert ended == code, said
    *before, last = (line for line in said.splitlines() if line.startswith("gpuscore: "))
    stopped = re.fullmatch(r"gpuscore: stopped at (\d+) of 1000 rows, run again", last)
    assert stopped, said
    told = re.compile(r"gpuscore: (\d+) of 1000 rows, \d+\.\d rows/s, \d+:\d\d:\d\d left")
    assert int(told.fullmatch(before[-1])[1]) <= int(stopped[1]) < 1000
    if number == signal.SIGINT:
        return
    ended, said = ended_by(number, job, work, 5)
    assert f"gpuscore: resuming at {stopped[1]} of 1000 rows\n" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("every", [0.0, 60.0])
def test_results_of_a_part_are_kept_before_it_is_whole(tmp_path, monkeypatch, every):
    """Otherwise a job that is killed every minute would never end on a slow machine."""
    monkeypatch.setattr("gpuscore.commands.bulk.scoring.SAVE_EVERY", every)
    kept, seen = tmp_path / "out.jsonl.work" / "0.part", []

    def looks(engine):
        score_all = engine.score_all

        def look(requests):
            seen.append(kept.exists())
            return score_all(requests)

        engine.score_all = look
        return engine

    source = write_jsonl(tmp_path / "in.jsonl", make_rows(300, queries=60))
    run(source, tmp_path / "out.jsonl", lambda: fake_model(looks, max_tokens=16))
    assert any(seen) == (every == 0.0)


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
    with pytest.raises(
        ConfigError, match="SHA-256 of --input was .*; to start the job again, remove"
    ):
        run(source, output)
    source.write_bytes(old.replace(b"blue", b"pink"))
    os.utime(source, ns=(0, 0))
    with pytest.raises(ConfigError, match="SHA-256 of --input was"):
        run(source, output)
    source.write_bytes(old)  # the same content at another time is the same input
    os.utime(source, ns=(0, 0))
    run(source, output)


def test_a_change_that_keeps_size_and_time_is_found_before_the_output_appears(tmp_path):
    source, output = unfinished(tmp_path)
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b"blue", b"pink"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ConfigError, match="SHA-256 of --input was"):
        run(source, output)
    assert not output.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": "no,yes"}, "--labels was yes,no when this job began and is no,yes"),
        ({"query_column": None}, "--query-column was query .* and is not set"),
        ({"apply_softmax": False}, "--apply-softmax was true .* and is false"),
        ({"settings": {"--dtype": "float32"}}, "--dtype was auto .* and is float32"),
    ],
)
def test_a_changed_option_is_refused(tmp_path, change, message):
    source, output = unfinished(tmp_path, settings={"--dtype": "auto"})
    with pytest.raises(ConfigError, match=message) as caught:
        run(source, output, **({"settings": {"--dtype": "auto"}} | change))
    assert f"to start the job again, remove {tmp_path / 'out.jsonl.work'}" in str(caught.value)


def test_a_second_run_is_refused(tmp_path):
    source, output = unfinished(tmp_path)
    held = os.open(tmp_path / "out.jsonl.work", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is writing it"):
        run(source, output)
    os.close(held)
    run(source, output)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.bad.jsonl"])
def test_nothing_is_overwritten(tmp_path, name):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=f"{name} exists already"):
        run(source, tmp_path / "out.jsonl")
    assert (tmp_path / name).read_text() == "precious"
    assert not (tmp_path / "out.jsonl.work").exists()


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, None])
def test_a_damaged_part_is_scored_again(tmp_path, damage):
    rows = make_rows(300, queries=60)
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        run(source, output, stops_after(40))
    (part,) = (tmp_path / "out.jsonl.work").glob("*.part")
    content = part.read_bytes()
    part.write_bytes(content[:-9] + content[-8:] if damage is None else damage)
    run(source, output)
    check(rows, [row["scores"] for row in read_jsonl(output)])
