"""Promise: bench/gpu_day.py ends within its time and keeps what every stage found, whatever goes
wrong. Here its stages run on a CPU; their figures mean nothing."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import gpu_day
from gpu_day import Day
from gpu_stages import Stage, stages

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
ABOUT = {"device": "a card", "commit": "1234567"}


def python(code, *arguments):
    return (sys.executable, "-S", "-c", code, *arguments)


def stage(name, code, *arguments, limit=30.0):
    return Stage(name, limit, lambda text: {"said": text.split()}, (python(code, *arguments),))


@pytest.fixture
def day(tmp_path):
    """A day without stages, in two folders."""
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    return Day(tmp_path / "out", tmp_path / "work", ABOUT)


def left_in(folder):
    """Return the findings in a folder, which must have just the one file."""
    (path,) = folder.iterdir()
    return json.loads(path.read_text())["stages"]


@pytest.mark.slow
def test_some_stages_on_a_cpu(tmp_path, capsys):
    code = gpu_day.main(["--device=cpu", f"--output={tmp_path}", "--stages=ceilings;triton;tests"])
    assert code == 0, capsys.readouterr().out
    found = left_in(tmp_path)
    assert list(found) == ["ceilings", "triton", "tests"]
    rows = found["triton"]["found"]["rows"]
    named = ("a", "a cached", "b cached", "d", "300")
    timed = [(row["scorer"], row["workload"]) for row in rows]
    assert not any("failed" in row or "wrong" in row for row in rows)
    wanted = [("triton", name) for name in named] + [("triton under load", "a")]
    assert timed == wanted + [("triton, engine", name) for name in named]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[5]["of sustained floor"] > 0
    cached = {row["workload"]: row["cached"] for row in rows[:5]}
    assert cached["a"] == 0
    assert cached["a cached"] > 150
    assert found["tests"]["found"]["passed"] > 0


def test_the_day_runs_all_tests_of_a_device():
    """The day and `make test-gpu` both run all tests of a device."""
    planned = stages("cuda", ROOT)
    commands = [command for stage in planned for command in stage.commands]
    here = Path(__file__)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != here]
    marked = {path for path in files if "mark.gpu" in path.read_text()}
    assert len(marked) >= 3
    run = {ROOT / word for words in commands for word in words if str(word).startswith("tests/")}
    assert {path for path in marked if not run & {path, *path.parents}} == set()
    left_out = {ROOT / str(word).removeprefix("--ignore=") for word in commands[-1]}
    assert {path for path in left_out if path.suffix == ".py"} <= run, "in a stage of their own"
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-gpu:")[2].partition("\n\n")[0]
    folder = ROOT / "tests/kernels/triton_interpreter"
    assert folder in run
    outside = (path for path in run if folder not in path.parents)
    assert all(str(path.relative_to(ROOT)) in recipe for path in outside)


def gone_wrong(planned, then):
    """Return a stage of the day that prints something and then goes wrong."""
    code = f"import os, time; print('half', flush=True); {then}"
    return replace(planned, commands=(python(code),), read=lambda text: {"said": text.split()})


WRONG = (
    ("os._exit(3)", "ended with 3"),
    ("os.kill(os.getpid(), 9)", "ended with -9"),
    ("time.sleep(99)", "took more than"),
)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_stages_that_go_wrong_cost_no_other(day, first):
    """All three turns together give each stage a failure, a kill and a hang."""
    planned = stages("cpu", day.scratch)
    turns = [WRONG[(first + number) % 3] for number in range(len(planned))]
    pairs = list(zip(planned, turns, strict=True))
    day.run(
        [
            replace(gone_wrong(each, then), limit=2.0 if "sleep" in then else 60.0)
            for each, (then, _) in pairs
        ],
        minutes=9,
    )
    found = left_in(day.folder)
    assert list(found) == [each.name for each in planned] == day.missing
    assert all(why in found[each.name]["why"] for each, (_, why) in pairs)
    assert all(about["found"]["said"][0] == "half" for about in found.values())


def test_a_killed_day_loses_one_stage(tmp_path):
    """The day is killed with its second stage, which ends with it."""
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    alive = tmp_path / "alive"
    beats = (
        f"import time\nwhile 1: open({str(alive)!r}, 'w').write(str(time.time())); time.sleep(.02)"
    )
    code = (
        f"import sys; sys.path[:0] = [{str(BENCH)!r}, {str(Path(__file__).parent)!r}]\n"
        "import test_gpu_day as t\n"
        f"at = t.Path({str(tmp_path)!r}); day = t.Day(at / 'out', at / 'work', t.ABOUT)\n"
        f"day.run([t.stage('one', 'print(1)'), t.stage('two', {beats!r})], minutes=9)"
    )
    process = subprocess.Popen((sys.executable, "-c", code), cwd=ROOT)
    end = time.monotonic() + 60
    while not alive.is_file():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = left_in(tmp_path / "out")
    assert {name: about["status"] for name, about in found.items()} == {"one": "done"}
    time.sleep(0.3)
    last = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == last, "the stage would use the card beside the next run"


def test_the_day_ends_by_its_own_clock(day, monkeypatch):
    monkeypatch.setattr(gpu_day, "LEAST", 0.5)
    start = time.monotonic()
    day.run([stage(name, "import time; time.sleep(99)") for name in "abc"], minutes=11 / 60)
    assert time.monotonic() - start < 5
    found = left_in(day.folder)
    assert [about["status"] for about in found.values()] == ["failed", "not reached", "not reached"]


def test_a_stage_that_hangs_is_ended_with_its_children(day, tmp_path):
    alive = tmp_path / "alive"
    child = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"while 1: open({str(alive)!r}, 'w').write(str(time.time())); time.sleep(.02)"
    )
    parent = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
    parent += (
        f"import os\nwhile not os.path.exists({str(alive)!r}): time.sleep(.05)\ntime.sleep(60)"
    )
    day.run([stage("hangs", parent, child, limit=2.0)], minutes=1)
    assert day.stages["hangs"]["why"].startswith("took more than 2 s")
    last = alive.read_text()
    time.sleep(0.3)
    assert alive.read_text() == last


def test_a_stage_sees_what_was_brought_along(day, tmp_path, monkeypatch):
    (tmp_path / "brought_along.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    day.run([stage("told", "import brought_along, gpu_stages, support")], minutes=9)
    assert day.missing == []


@pytest.mark.parametrize("holds", [True, False])
def test_a_test_that_fails_fails_the_day(day, tmp_path, holds):
    path = tmp_path / "test_some.py"
    path.write_text(
        f"import time\ndef test_one():\n    assert {holds}\ndef test_two():\n    time.sleep(99)\n"
    )
    planned = stages("cpu", day.scratch)[-1]
    chosen = [path if str(word).startswith("tests/") else word for word in planned.commands[0]]
    if holds:
        chosen += ["-k", "one"]
    day.run([replace(planned, commands=(tuple(chosen),), limit=60.0 if holds else 6.0)], minutes=1)
    assert day.missing == ([] if holds else ["tests"])
    found = day.stages["tests"]["found"]
    assert found["tests"] == 1, "the second one hangs; the first one's outcome is kept"
    names = [name.rpartition("::")[2] for name in found["not passed"]]
    assert names == ([] if holds else ["test_one"])
