"""Promise: gpuscore calibrate writes what serve applies and /info shows, names bad rows, and its
page shows what it prints."""

import json
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from demo import questions
from gpuscore import Choice, Scorer
from gpuscore.commands.cli import EXIT_CONFIG, EXIT_FAILED, main
from gpuscore.prompts.calibration import Calibration
from support.connections import connected
from support.pages import HOW_TO, blocks
from support.serving import QUICK, serving

PAGE = HOW_TO / "calibrate.md"
NOUL = {"type": "noul", "instructions": "Does the item fit the query?"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The page's rows, made as it says."""
    directory = tmp_path_factory.mktemp("data")
    patch = pytest.MonkeyPatch()
    words = blocks(PAGE, "sh")[0].split(" > ")[0].split()
    patch.setattr(sys, "argv", words[4:])
    with (directory / "questions.jsonl").open("w") as file:
        patch.setattr(sys, "stdout", file)
        questions.main()
        patch.undo()
    return directory / "questions.jsonl"


def run(data, *more) -> int:
    return main(["calibrate", "demo", "--threads", "1", "--data", str(data), *more])


def test_the_page_shows_what_is_printed_and_serve_applies_it(data, monkeypatch, capsys):
    monkeypatch.chdir(data.parent)
    assert blocks(PAGE, "json")[0] == data.read_text().splitlines(keepends=True)[0]
    assert run(data, "--output", "calibration.json") == 0
    assert capsys.readouterr().out == blocks(PAGE, "text")[0]
    made = Calibration.read(data.parent / "calibration.json")
    assert made.about["rows"] == 800
    drawing = ElementTree.fromstring((data.parent / "reliability.svg").read_text())
    assert len(drawing.findall(".//{*}polyline")) == 6
    asked = {"state": "query: a red lamp\nitem: A lamp.", "questions": {"q": NOUL}}
    values = []
    for flags in ((), ("--calibration", "calibration.json")):
        with serving("demo", *flags, *QUICK) as running, connected(running) as client:
            values.append(client.post("/v1/systemone", json=asked).json()["answers"]["q"]["noul"])
            shown = client.get("/info").json()["gpuscore"]["calibration"]
    assert shown == json.loads((data.parent / "calibration.json").read_text())
    odds = [np.log(value / (1 - value)) for value in values]
    assert odds[1] == pytest.approx(odds[0] / made.of("noul").temperature, rel=1e-3)


def test_another_order_is_refused(data, monkeypatch, capsys):
    monkeypatch.chdir(data.parent)
    few = data.parent / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:40]))
    assert run(few, "--output", "balanced.json", "--decision-order", "balanced", "--bias") == 0
    made = Calibration.read(data.parent / "balanced.json")
    assert len(made.of("noul").bias) == 2
    code = main(["info", "demo", "--calibration", "balanced.json"])
    assert code == EXIT_CONFIG
    assert "was fitted with --decision-order 'balanced', not fixed" in capsys.readouterr().err
    with Scorer(
        "demo", threads=1, decision_order="balanced", calibration="balanced.json"
    ) as scorer:
        assert scorer.system_one("x", {"q": Choice("?", ["a", "b"])})


GOOD = {"state": "a lamp", "questions": {"q": NOUL}, "answers": {"q": True}}
CHOICE, SCORE = {"type": "choice", "criteria": {"a": None}}, {"type": "score", "criteria": ["a"]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not valid JSON"),
        (GOOD | {"answers": {}}, "answers must have the names"),
        (GOOD | {"answers": {"q": True, "r": True}}, "answers must have the names"),
        (GOOD | {"answers": {"q": 1}}, "answers[0] must be true or false"),
        (GOOD | {"questions": {"q": CHOICE}}, "answers[0] must be a name"),
        (GOOD | {"questions": {"q": CHOICE}, "answers": {"q": "b"}}, "answers[0] must be a name"),
        (GOOD | {"questions": {"q": SCORE}, "answers": {"q": 1}}, "a number from 0 to 0"),
        (GOOD | {"questions": {"q": SCORE}}, "a number from 0 to 0"),
        (GOOD | {"questions": {"q": {"type": "box"}}}, "box asks for a place"),
        (GOOD | {"state": None}, "state must not be null"),
        (GOOD | {"more": 1}, "unknown field more"),
        (GOOD | {"questions": {"q": {"type": "noul"}}}, "neither instructions nor criteria"),
        (GOOD | {"state": "lamp " * 5000}, "the limit is 4096"),
    ],
)
def test_bad_rows_are_named(tmp_path, capsys, row, words):
    lines = [json.dumps(GOOD), "", row if isinstance(row, str) else json.dumps(row)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    out = tmp_path / "calibration.json"
    assert run(tmp_path / "rows.jsonl", "--output", str(out)) == EXIT_FAILED
    told = capsys.readouterr().err
    assert "row 3: " in told
    assert words in told
    assert not out.exists()


def test_too_few_rows_and_missing_files(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert run(tmp_path / "rows.jsonl", "--output", str(tmp_path / "c")) == EXIT_FAILED
    assert "noul has 1 rows; 5 folds need 20" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("\n" * 3)
    assert run(tmp_path / "rows.jsonl") == EXIT_FAILED
    assert "has no rows" in capsys.readouterr().err
    assert run(tmp_path / "none.jsonl") == EXIT_CONFIG
    bad = "".join("x\n" for _ in range(14))
    (tmp_path / "rows.jsonl").write_text(bad)
    assert run(tmp_path / "rows.jsonl") == EXIT_FAILED
    told = capsys.readouterr().err
    assert "bad rows: 14" in told
    assert "row 10: " in told
    assert "row 11: " not in told
    assert "... and 4 more" in told
