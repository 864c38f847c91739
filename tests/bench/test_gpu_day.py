"""Promise: bench/gpu_day.py keeps what every stage found, and continues where a run ended. Here its
stages run on a CPU; their figures mean nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_day
from gpu_day import Day, write_page
from gpu_day_stages import REAL, Stage, fastest, run_stage, stages
from in_time import outcomes

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
    content = json.loads((tmp_path / "gpu-day.json").read_text())
    assert code == 0, capsys.readouterr().out
    assert list(content["stages"]) == [
        candidate.name for candidate in stages("cpu", tmp_path, trial=True)
    ]
    skipped = [name for name, about in content["stages"].items() if about["status"] == "skipped"]
    absent = [] if (REAL / "config.json").is_file() else ["parity of SmolLM2 with transformers"]
    assert skipped == absent, "the environment of the tests has all packages"
    ran = content["stages"].keys() - set(skipped)
    done = {name: content["stages"][name]["found"] for name in ran}
    assert done["tests"]["passed"] > 0
    assert all(row["wall ms"] > 0 for row in done["bench: gpuscore"]["rows"])
    assert {row["cached"] for row in done["attention"]["rows"]} == {True, False}
    assert set(done["attention"]["fastest"].values()) <= {"torch", "triton"}
    assert "parity-with-a-CPU" in "".join(done["parity with a CPU"]["compared"])
    assert "torch:bfloat16" in "".join(done["parity with transformers"]["compared"])
    page = (tmp_path / "gpu-day.html").read_text()
    assert all(f"<td>{name}</td><td>done</td>" in page for name in ran)


def wait_until(holds, seconds=600):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_day_runs_all_tests_of_a_device():
    """The day and `make test-gpu` both run all tests of a device."""
    planned = [
        candidate
        for candidate in stages("cuda", ROOT, trial=False)
        if candidate.name.startswith("tests")
    ]
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
    (planned,) = [
        candidate for candidate in stages("cpu", tmp_path, trial=True) if candidate.name == "tests"
    ]
    (command,) = planned.commands
    (tests,) = [word for word in command if str(word).startswith("tests/")]
    changed = [path if word == tests else word for word in command]
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([replace(planned, commands=(changed,))], tmp_path, minutes=1)
    assert day.missing.keys() == (set() if holds else {"tests"})
    assert ("1 passed" if holds else "1 failed") in (tmp_path / "tests.txt").read_text()
    names = day.stages["tests"]["found"]["not passed"]
    assert [name.rpartition("::")[2] for name in names] == ([] if holds else ["test_one"])


def test_tests_that_hang_keep_the_outcomes_of_the_others(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text("import time\ndef test_one():\n    pass\ndef test_two():\n    time.sleep(99)\n")
    (planned,) = [
        candidate for candidate in stages("cpu", tmp_path, trial=True) if candidate.name == "tests"
    ]
    chosen = [path if str(word).startswith("tests/") else word for word in planned.commands[0]]
    hanging = replace(planned, commands=(chosen,), limit=20.0)
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([hanging], tmp_path, minutes=2)
    assert day.stages["tests"]["status"] == "failed"
    assert day.stages["tests"]["found"] == {"tests": 1, "passed": 1, "not passed": []}


def test_tests_stop_when_the_time_is_up(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        "import time, pytest\n@pytest.mark.parametrize('n', range(99))\n"
        "def test_one(n):\n    time.sleep(.5)\n"
    )
    (planned,) = [
        candidate for candidate in stages("cpu", tmp_path, trial=True) if candidate.name == "tests"
    ]
    chosen = [path if str(word).startswith("tests/") else word for word in planned.commands[0]]
    day = Day.open(tmp_path / "day.json", ABOUT)
    day.run([replace(planned, commands=(chosen,), limit=25.0)], tmp_path, minutes=2)
    assert "ended with 2" in day.stages["tests"]["why"]
    assert 0 < day.stages["tests"]["found"]["passed"] < 99
    assert "the stage's time is up" in (tmp_path / "tests.txt").read_text()


def test_an_outcome_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    path.write_text('{"test": "a", "outcome": "failed"}\n{"test": "b", "outc')
    assert outcomes(path) == {"tests": 1, "failed": 1, "not passed": ["a"]}


def test_a_stage_ends_with_a_day_that_is_killed(tmp_path):
    """A stage that ran on would use the card beside the run that continues the day."""
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
    # One that has failed would fail again, and takes the time of others.
    assert statuses(again) == {"works": "done", "fails": "failed", "waits": "done"}
    assert again.missing.keys() == {"fails"}
    assert notes.read_text() == "xx"


# What a stage leaves before it goes wrong, by the name of its file of findings.
PARTS = {".json": '{"rows": []}', ".jsonl": '{"test": "a", "outcome": "passed"}\n', "": "scores "}


def gone_wrong(planned, then):
    """Return a stage of the day that leaves half of its findings, and then goes wrong."""
    text = PARTS[".json"] if planned.clears is None else PARTS.get(planned.clears.suffix, "")
    text = "" if planned.name == "attention" else text
    write = f"open({str(planned.clears)!r}, 'w').write({text!r}); " if planned.clears else ""
    code = f"import os, time; {write}print('scores agree', flush=True); {then}"
    return replace(planned, commands=(python(code),), packages=(), model=None)


def test_a_failure_and_a_hang_in_each_stage_lose_no_findings(tmp_path):
    for then, limit, why in (("os._exit(3)", 60.0, "with 3"), ("time.sleep(99)", 2.0, "than 2 s")):
        folder = tmp_path / why[:4]
        folder.mkdir()
        planned = [
            replace(gone_wrong(candidate, then), limit=limit)
            for candidate in stages("cpu", folder, trial=True)
        ]
        day = Day.open(folder / "day.json", ABOUT)
        day.run(planned, folder, minutes=9)
        assert set(statuses(day).values()) == {"failed"}
        assert all("found" in about and why in about["why"] for about in day.stages.values())
        assert read(folder / "day.json")["stages"] == day.stages


def read(path):
    return json.loads(path.read_text())


def test_a_kill_in_each_stage_loses_no_findings(tmp_path):
    """Each run of the day is killed one stage later; the last runs repeat these stages."""
    names = [candidate.name for candidate in stages("cpu", tmp_path, trial=True)]
    for number, name in enumerate(names):
        assert run_day(tmp_path) == -signal.SIGKILL
        settings = read(tmp_path / "gpu-day.json")["stages"]
        assert settings[name]["status"] == "begun"
        assert list(settings) == names[: number + 1]
        assert all("found" in settings[before] for before in names[:number])
        assert {settings[before]["status"] for before in names[:number]} <= {"cut off"}
        assert (tmp_path / "gpu-day.html").is_file()
    (tmp_path / "well").touch()
    assert run_day(tmp_path) == 0
    settings = read(tmp_path / "gpu-day.json")["stages"]
    assert {about["status"] for about in settings.values()} == {"done"}
    assert all("found" in about["cut off"] for about in settings.values())


def run_day(folder):
    """Run the day in a process of its own, whose stages kill it until there is a file `well`."""
    code = (
        f"import sys; sys.path[:0] = [{str(BENCH)!r}, {str(Path(__file__).parent)!r}]\n"
        f"import test_gpu_day; test_gpu_day.killed_day(test_gpu_day.Path({str(folder)!r}))"
    )
    return subprocess.run(python(code), check=False, cwd=ROOT).returncode


def killed_day(folder):
    kill = f"os.path.exists({str(folder / 'well')!r}) or (os.kill({os.getpid()}, 9), time.sleep(9))"
    planned = [gone_wrong(candidate, kill) for candidate in stages("cpu", folder, trial=True)]
    Day.open(folder / "gpu-day.json", ABOUT).run(planned, folder, minutes=9)


def test_a_stage_without_its_packages_is_skipped(tmp_path):
    day = Day.open(tmp_path / "day.json", ABOUT)
    needy = replace(stage("needs", "print('x')"), packages=("json", "no_such_package"))
    day.run([needy], tmp_path, minutes=1)
    assert statuses(day) == {"needs": "skipped"}
    assert day.stages["needs"]["why"] == "not there: no_such_package"
    assert not day.missing


def test_a_stage_is_told_its_time_and_sees_what_was_brought_along(tmp_path, monkeypatch):
    (tmp_path / "brought_along.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    day = Day.open(tmp_path / "day.json", ABOUT)
    code = "import brought_along, in_time; print(in_time.seconds_left() + in_time.RESERVE)"
    day.run([stage("told", code, limit=77.0)], tmp_path, minutes=9)
    (left,) = day.stages["told"]["found"]["said"]
    assert 0 < float(left) <= 77.0


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
