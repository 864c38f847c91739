"""Promise: OUTPUT.work is used only if it holds nothing but files of a job, no file of anybody else
is deleted or written, and a damaged or forged state is told in one line or does no harm."""

import os

import pytest
from pyarrow import parquet

from gpuscore.errors import ConfigError
from support.batch_jobs import (
    Killed,
    check,
    fake_model,
    make_rows,
    read_jsonl,
    run,
    stops_after,
    write_input,
    write_jsonl,
)
from support.slow import slow

ROWS = make_rows(25, queries=5)
BAD = {"id": 25, "query": "q", "item": None}


ENDS = {
    "write": "gpuscore.commands.bulk.command.write_output",
    "publish": "gpuscore.commands.bulk.command.publish",
    "renamed": "gpuscore.commands.bulk.work.JobFolder.remove",
}


def killed(*_, **__):
    raise Killed


def stopped(tmp_path, monkeypatch, step):
    """Leave a job that ended before this step; return its input and output."""
    kind = "parquet" if step == "typed" else "jsonl"
    source = write_input(tmp_path, kind, [*ROWS, BAD])
    output = tmp_path / f"out.{kind}"
    model = stops_after(0) if step in ("score", "typed") else fake_model
    with monkeypatch.context() as patch:
        if step in ENDS:
            patch.setattr(ENDS[step], killed)
        with pytest.raises(Killed):
            run(source, output, model)
    return source, output


def snapshot(folder):
    """Return every file below a folder with its content, links as such."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def put(files):
    """Return a function that writes files into a folder."""

    def make(work):
        for name, content in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)

    return make


def linked(work):
    work.parent.joinpath("mine").mkdir()
    (work.parent / "mine" / "photo.jpg").write_bytes(b"precious")
    work.symlink_to(work.parent / "mine")


def links(name):
    def make(work):
        (work.parent / "mine").write_bytes(b"precious")
        put({"job.state": b"{}", "0.part": b"{}"})(work)
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(work.parent / "mine")

    return make


FOREIGN = {
    "a file": (put({"notes.txt": b"precious"}), "notes.txt"),
    "a folder": (put({"photos/1.jpg": b"precious"}), "photos"),
    "names that we use": (put({"0.part": b"precious", "bad.new": b"mine"}), "holds 0.part"),
    "another's job": (put({"job.state": b'{"mine": 1}', "0.part": b"precious"}), "job.state"),
    "a file among parts": (put({"job.state": b"{}", "a.part": b"precious"}), "a.part"),
    "a folder with a file's name": (put({"job.state/1": b"precious"}), "job.state"),
    "a link": (linked, "out.jsonl.work: "),
    "a linked file": (links("0.part"), "0.part"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_files_of_others_are_not_touched(tmp_path, case):
    make, named = FOREIGN[case]
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    make(tmp_path / "out.jsonl.work")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"out\.jsonl\.work") as caught:
        run(source, tmp_path / "out.jsonl")
    assert named in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("left", [{}, {"job.state.new": b'{"sh'}])
def test_a_job_that_was_killed_before_its_first_state_resumes(tmp_path, left):
    source, output = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.work").mkdir()
    put(left)(tmp_path / "out.jsonl.work")
    run(source, output)
    check(ROWS, [row["scores"] for row in read_jsonl(output)])
    assert not (tmp_path / "out.jsonl.work").exists()


def test_a_file_that_comes_meanwhile_stays(tmp_path, monkeypatch):
    source, output = stopped(tmp_path, monkeypatch, "score")
    work = tmp_path / "out.jsonl.work"

    def writes(engine):
        put({"notes.txt": b"precious", "parts/1.part": b"precious"})(work)
        return engine

    run(source, output, lambda: fake_model(writes))
    check(ROWS, [row["scores"] for row in read_jsonl(output)])
    assert snapshot(work) == {"notes.txt": b"precious", "parts/1.part": b"precious"}


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.bad.jsonl"])
def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch, name):
    source, output = stopped(tmp_path, monkeypatch, "publish")
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(ConfigError, match=f"{name} exists already"):
        run(source, output)
    assert (tmp_path / name).read_bytes() == b"precious"
    (tmp_path / name).unlink()
    run(source, output)
    check(ROWS, [row["scores"] for row in read_jsonl(output)])


def mutations(content):
    """Yield other contents of a file: cut off, empty, another's; None removes it."""
    yield from (None, b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff\xfe\x00")
    for length in {len(content) // 4, len(content) // 2, len(content) - 1} - {-1, 0}:
        yield content[:length]


def outcome_of(source, output):
    """Run a job; return its error, or None after a check of its output."""
    try:
        run(source, output)
    except ConfigError as error:
        return str(error)
    if output.suffix == ".jsonl":
        rows = read_jsonl(output)
    else:
        rows = parquet.read_table(output).to_pylist()
    assert [row["id"] for row in rows] == list(range(25))
    assert [row["item"] for row in rows] == [row["item"] for row in ROWS]
    check(ROWS, [row["scores"] for row in rows])
    return None


@pytest.mark.parametrize("step", ["score", *slow("typed"), "write", "publish", *slow("renamed")])
def test_damaged_states(tmp_path, monkeypatch, step):
    """Each file of a stopped job is damaged in turn: the job gives the right output or one line."""
    source, output = stopped(tmp_path, monkeypatch, step)
    before = snapshot(tmp_path)
    files = [name for name in before if name != source.name]
    assert len(files) > 1
    right = told = 0
    for name in files:
        for content in mutations(before[name]):
            for path in tmp_path.rglob("*"):
                if path.is_file():
                    path.unlink()
            put(before | {name: content or b""})(tmp_path)
            if content is None:
                (tmp_path / name).unlink()
            problem = outcome_of(source, output)
            if problem is None:
                right += 1
            else:
                assert "\n" not in problem
                told += 1
    assert told > 9
    assert right > 9 or step == "renamed"
