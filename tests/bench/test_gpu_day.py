"""Promise: bench/gpu_day.py keeps what every stage found, and continues where a run ended. Here its
stages run on a CPU; their figures mean nothing."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_day
from gpu_day import Day, write_page
from gpu_day_stages import Stage, fastest, run_stage, stages

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
ABOUT = {"device": "a card", "commit": "1234567"}


def python(code, *arguments):
    return (sys.executable, "-c", code, *arguments)


def stage(name, code, *arguments, limit=30.0, needs=0.0):
    return Stage(
        name, (python(code, *arguments),), lambda text: {"said": text.split()}, limit, needs
    )


def statuses(day):
    return {name: about["status"] for name, about in day.stages.items()}


@pytest.mark.slow
def test_every_stage_can_be_tried_on_a_cpu(tmp_path, capsys):
    code = gpu_day.main(["--device=cpu", f"--output={tmp_path}", "--minutes=60"])
    found = json.loads((tmp_path / "gpu-day.json").read_text())
    assert code == 0, capsys.readouterr().out
    assert list(found["stages"]) == [one.name for one in stages("cpu", tmp_path, trial=True)]
    done = {name: about["found"] for name, about in found["stages"].items()}
    assert done["tests"]["tests"] > 0
    assert all(row["wall ms"] > 0 for row in done["bench: gpuscore"]["rows"])
    assert {row["cached"] for row in done["attention"]["rows"]} == {True, False}
    assert set(done["attention"]["fastest"].values()) <= {"torch", "triton"}
    assert "parity-float32" in "".join(done["parity with a CPU"]["compared"])
    assert "torch:bfloat16" in "".join(done["parity with transformers"]["compared"])
    page = (tmp_path / "gpu-day.html").read_text()
    assert all(f"<td>{name}</td><td>done</td>" in page for name in found["stages"])


def wait_until(holds, seconds=600):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_day_runs_all_tests_of_a_device():
    """And so does make test-gpu."""
    planned = stages("cuda", ROOT, trial=False)[:2]
    words = [word for stage in planned for command in stage.commands for word in command]
    here = Path(__file__)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != here]
    marked = {path for path in files if "mark.gpu" in path.read_text()}
    assert len(marked) >= 3
    run = {ROOT / word for word in words if str(word).startswith("tests/")}
    assert marked | {ROOT / "tests/kernels/triton_interpreter"} == run
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-gpu:")[2].partition("\n\n")[0]
    assert all(str(path.relative_to(ROOT)) in recipe for path in run)


@pytest.mark.parametrize("holds", [True, False])
def test_a_test_that_fails_fails_the_day(tmp_path, holds):
    path = tmp_path / "test_one.py"
    path.write_text(f"def test_one():\n    assert {holds}\n")
    planned, *_ = stages("cpu", tmp_path, trial=True)
    (command,) = planned.commands
    (tests,) = [word for word in command if str(word).startswith("tests/")]
    changed = [path if word == tests else word for word in command]
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([replace(planned, commands=(changed,))], tmp_path, minutes=1)
    assert day.missing.keys() == (set() if holds else {"tests"})
    assert ("1 passed" if holds else "1 failed") in (tmp_path / "tests.txt").read_text()


def test_a_stage_ends_with_a_day_that_is_killed(tmp_path):
    """Otherwise it would use the card beside the run that continues the day."""
    alive = tmp_path / "alive"
    write = f"open({str(alive)!r}, 'w').write(str(time.time()))"
    beats = f"import time\nwhile True: {write}; time.sleep(.05)"
    code = f"import sys\nsys.path.insert(0, {str(BENCH)!r})\nfrom group import run_group\n"
    code += f"run_group([sys.executable, '-c', {beats!r}])"
    day = subprocess.Popen(python(code))
    wait_until(alive.is_file)
    day.kill()
    day.wait()
    time.sleep(0.3)
    last = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == last


def test_a_run_continues_where_the_last_one_ended(tmp_path):
    notes = tmp_path / "notes"
    note = f"open({str(notes)!r}, 'a').write('x'); print('hello')"
    failing = stage("fails", "import sys; print('why'); sys.exit(3)")
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([stage("works", note), failing, stage("waits", note, needs=1e9)], tmp_path, minutes=1)
    assert statuses(day) == {"works": "done", "fails": "failed", "waits": "not reached"}
    assert day.stages["works"]["found"] == {"said": ["hello"]}
    assert "ended with 3" in day.stages["fails"]["why"]
    assert day.stages["fails"]["printed"] == "why\n"
    assert day.missing.keys() == {"fails", "waits"}
    again = Day.open(tmp_path / "day.json", ABOUT)
    again.run(
        [stage("works", note), stage("fails", note), stage("waits", note)], tmp_path, minutes=1
    )
    assert set(statuses(again).values()) == {"done"}
    assert not again.missing
    assert notes.read_text() == "xxx"  # the first stage ran once


def test_an_attempt_leaves_nothing_to_the_next(tmp_path):
    rows, bundle = tmp_path / "rows.jsonl", tmp_path / "bundle"
    add = f"open({str(rows)!r}, 'a').write('x')"
    make = f"import os; os.mkdir({str(bundle)!r})"
    for path, code in ((rows, add), (bundle, make)):
        adding = Stage("adds", (python(code),), lambda _: {}, 30.0, clears=path)
        assert [run_stage(adding, tmp_path, 30.0)["status"] for _ in range(2)] == ["done"] * 2
    assert rows.read_text() == "x"


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path):
    alive = tmp_path / "alive"
    write = f"open({str(alive)!r}, 'w').write(str(time.time()))"
    child = f"import time\nwhile True: {write}; time.sleep(.05)"
    parent = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
    parent += "time.sleep(60)"
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([stage("hangs", parent, child, limit=3.0)], tmp_path, minutes=1)
    assert day.stages["hangs"]["why"].startswith("took more than 3 s")
    last = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == last


def test_findings_of_another_card_are_not_mixed(tmp_path):
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([stage("works", "print('x')")], tmp_path, minutes=1)
    with pytest.raises(SystemExit, match="another card.*give another --output"):
        Day.open(tmp_path / "day.json", ABOUT | {"device": "another card"})


def test_findings_that_cannot_be_read_fail_the_stage(tmp_path):
    day = Day.open(tmp_path / "day.json", ABOUT)
    empty = Stage("empty", (python(""),), lambda text: {"last": text.splitlines()[-1]}, 30.0)
    day.run([empty], tmp_path, minutes=1)
    assert "cannot be read: IndexError" in day.stages["empty"]["why"]


def test_the_page_shows_rows_and_what_was_not_reached(tmp_path):
    rows = [{"scorer": "gpuscore", "workload": "a", "device ms": 33.0, "wall ms": 35.0}]
    day = {"date": "today", "about": ABOUT, "planned": ["bench: gpuscore", "tests"]}
    day |= {"stages": {"bench: gpuscore": {"status": "done", "found": {"rows": rows}}}}
    page = write_page(tmp_path, day).read_text()
    assert "<td>33</td>" in page
    assert "not reached" in page


def test_the_fastest_is_found_for_each_workload():
    rows = [
        {"workload": "x", "cached": cached, "way": way, "ms": ms}
        for way, cached, ms in (("triton", False, 2.0), ("torch", False, 1.5), ("triton", True, 3))
    ]
    assert fastest(rows) == {"x": "torch", "x, prefix cached": "triton"}


def test_a_stage_that_fails_keeps_what_it_found(tmp_path):
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([stage("fails", "import sys; print('half'); sys.exit(1)")], tmp_path, minutes=1)
    assert day.stages["fails"]["found"] == {"said": ["half"]}
    assert day.missing.keys() == {"fails"}
