"""Promise: the how-to pages for newcomers show requests, programs and commands that work, flags
that exist, predictions that a command made, and every error code."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpuscore.commands.cli import make_parser
from gpuscore.config import CONFIGS
from gpuscore.config.options import options
from gpuscore.config.sources import read_settings
from gpuscore.errors import GpuscoreError
from gpuscore.exits import EXIT_CONFIG, EXIT_ENGINE, EXIT_FAILED, EXIT_TEMPORARY
from support.pages import (
    HERE,
    HOW_TO,
    ROOT,
    TASKS,
    blocks,
    compare_numbers,
    other_routes,
    run_example,
    run_program,
)

COMING, TROUBLE = HOW_TO / "coming-from.md", HOW_TO / "troubleshoot.md"
MANY = TASKS / "overnight.md"
DEVICES = HOW_TO / "tune.md"
ANSWERED = re.compile(r"```http\nPOST (\S+)\n\n(\{.*?)```\n+```text\n(.*?)```", re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", COMING.read_text(), re.DOTALL | re.M))


@pytest.mark.parametrize("origin", ["vLLM", "SGLang", "TEI", "Infinity", "Cohere"])
def test_requests_of_other_servers_are_answered(demo, origin):
    ((path, body, shown),) = ANSWERED.findall(SECTIONS[origin])
    answer = demo.post(path, json=json.loads(body))
    assert answer.status_code == 200, answer.text
    compare_numbers(answer.text, shown)
    assert all(text in answer.text for text in re.findall(r'"[^"]*"', shown))


def test_programs_of_the_python_page_run(small_batches, demo, tmp_path):
    for program in blocks(HOW_TO / "python.md", "python"):
        run_program(program.replace(HERE, str(demo.base_url).rstrip("/")), tmp_path)


def test_routes_that_are_not_there_are_not(demo):
    routes = other_routes(COMING.read_text())
    assert routes == {
        "/pooling",
        "/generative_scoring",
        "/predict",
        "/embed",
        "/similarity",
    }
    assert {demo.post(route, json={}).status_code for route in routes} == {404}


def test_the_program_instead_of_sentence_transformers(small_batches, tmp_path, capsys):
    run_program(blocks(COMING, "python")[0], tmp_path)
    assert capsys.readouterr().out == blocks(COMING, "text")[-1]


def make_rows(command: str, monkeypatch, capsys) -> list[dict]:
    """Run a page's command that makes labelled rows, in this process; write its file."""
    example, file = command.strip().split(" > ")
    made = run_example(example, monkeypatch, capsys)
    Path(file).write_text(made)
    return [json.loads(line) for line in made.splitlines()]


@pytest.fixture(scope="module")
def threshold():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "threshold.py")))


def test_a_threshold_keeps_to_its_share_and_stops_no_more(threshold):
    rng = np.random.default_rng(0)
    for bad_total, allowed in ((1, 0), (49, 0), (50, 1), (111, 2)):
        scores = rng.permutation(np.linspace(0.01, 0.99, bad_total + 63))
        good = np.arange(len(scores)) >= bad_total
        scores[-1] = 0.995  # a text that passes
        chosen = threshold.choose(scores, good)
        assert (scores[~good] >= chosen).sum() == allowed
        next_lower = scores[scores < chosen].max()
        assert (scores[~good] >= next_lower).sum() == allowed + 1
    assert threshold.at_most(0, 92) == pytest.approx(0.0401, abs=1e-4)  # Wilson: z^2 / (n + z^2)
    assert threshold.at_most(3, 108) == pytest.approx(0.0785, abs=1e-4)


@pytest.mark.parametrize(("good", "bad"), [(0, 9), (9, 0), (1, 9), (0, 0)])
def test_too_few_texts_give_no_threshold(threshold, tmp_path, good, bad):
    rows = [{"prompt": "a", "good": True}] * good + [{"prompt": "a", "good": False}] * bad
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit, match=f"{min(good, bad)} texts of one kind"):
        threshold.main(str(tmp_path / "few.jsonl"), HERE, "yes", "no")


def rows_of(file: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_rows_are_classified_in_this_process(small_batches, tmp_path, monkeypatch, capsys):
    """Runs the page's program with fewer rows."""
    monkeypatch.chdir(tmp_path)
    first, *_, program = blocks(MANY, "sh")
    _, make = first.splitlines()
    rows = make_rows(make.replace("10000", "60"), monkeypatch, capsys)
    printed = run_example(program, monkeypatch, capsys)
    assert re.fullmatch(r"60 rows in \d+\.\d s, \d+ rows/s\n", printed)
    scored = rows_of(shlex.split(program)[-1])
    assert [{key: row[key] for key in ("prompt", "good")} for row in scored] == rows
    shown = json.loads(blocks(MANY, "json")[1])
    (row,) = (row for row in scored if row["prompt"] == shown["prompt"])
    assert row["yes"] == pytest.approx(shown["scores"][0], abs=5e-5)


@pytest.mark.slow
def test_commands_run_as_a_reader_runs_them(tmp_path):
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        ["bash", "-e"],
        input="".join([*blocks(MANY, "sh"), "wait $!\n"]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert blocks(MANY, "text")[0] in done.stdout
    both = [rows_of(tmp_path / f"{name}.jsonl") for name in ("scored", "scored-too")]
    for row, other in zip(*both, strict=True):
        assert row["prompt"] == other["prompt"]
        assert row["scores"][0] == pytest.approx(other["yes"], abs=1e-5)
    assert len(both[0]) == 10_000


CODES = re.compile(r"^\| `(\w+)` \| (\d+) \|(.*)\|$", re.MULTILINE)
EXAMPLE = re.compile(r"`(\{.*\})` $")


def test_every_error_code_has_a_row():
    rows = [(code, int(status)) for code, status, _ in CODES.findall(TROUBLE.read_text())]
    assert sorted(rows) == sorted((e.code, e.status) for e in GpuscoreError.__subclasses__())


def test_exit_codes_are_explained():
    text = TROUBLE.read_text().split("| exit code |")[1].split("\n\n")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {EXIT_FAILED, 2, EXIT_ENGINE, EXIT_TEMPORARY, EXIT_CONFIG}  # 2: argparse's


def test_examples_of_errors_get_them(demo):
    examples = [
        (code, int(status), match[1])
        for code, status, rest in CODES.findall(TROUBLE.read_text())
        if (match := EXAMPLE.search(rest))
    ]
    assert len(examples) >= 7
    for code, status, body in examples:
        answer = demo.post("/v1/score", json=json.loads(body))
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_flags_of_the_tuning_page_exist():
    commands = [line for block in blocks(DEVICES, "sh") for line in block.splitlines()]
    served = [shlex.split(line) for line in commands if line.startswith("gpuscore ")]
    assert len(served) >= 8
    for _, *words in served:
        settings = read_settings(vars(make_parser().parse_args(words)), {})
        for config in CONFIGS:
            settings.make(config)
    text = DEVICES.read_text()
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= {option.flag for option in options(*CONFIGS)}
    for device in ("L4", "RTX PRO 6000", "H100, H200", "TPU v6e", "CPU"):
        assert f"\n## {device}\n" in text
