"""Promise: the `gpuscore` command ranks, explains itself and reports errors in one sentence.

It runs in this process where that makes no difference.
"""

import fcntl
import io
import json
import os
import re
import shutil
import struct
import subprocess
import termios
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import gpuscore
from gpuscore import Scorer, __version__
from gpuscore.commands.cli import main

DEMO = Path(gpuscore.__file__).parent / "demo"
QUERY = "query: a red lamp\nitem: "
ITEMS = ["A blue chair.", "A red lamp.", "", "A naïve red lamp ☃"]


@pytest.fixture
def items_file(tmp_path):
    path = tmp_path / "items.txt"
    path.write_text("\n".join(ITEMS) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def expected():
    with Scorer("demo", max_batch_tokens=512) as scorer:
        return scorer.score(QUERY, ITEMS, labels=["yes", "no"]).scores


def score(*arguments):
    few = ("--max-batch-tokens", "512")  # at start a model runs its largest batches
    return main(["score", "demo", "--query", QUERY, "--labels", "yes,no", *few, *arguments])


def test_a_ranked_table(items_file, expected, capsys):
    assert score("--items", items_file) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["rank", "yes", "no", "item"]
    order = np.argsort(-expected[:, 0], kind="stable")
    for rank, (row, index) in enumerate(zip(rows, order, strict=True), start=1):
        parts = row.split(maxsplit=3)
        assert int(parts[0]) == rank
        np.testing.assert_allclose([float(p) for p in parts[1:3]], expected[index], atol=1e-5)
        assert row.endswith(f"  {ITEMS[index]}")
    assert ITEMS[order[0]] == "A red lamp."


def test_json_lines(items_file, expected, capsys):
    assert score("--items", items_file, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert [line["item"] for line in lines] == ITEMS
    got = [[line["scores"]["yes"], line["scores"]["no"]] for line in lines]
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("standard_input", [False, True])
def test_an_item_ends_with_its_line(tmp_path, capsys, monkeypatch, standard_input, end):
    """Every other character is the item's own: a lone CR, a form feed, a line separator."""
    items = ["a\rb", "", " c ", "d\x0ce\u2028f", "g\r\rh", "naïve ☃"]
    content = "".join(item + end for item in items).encode()
    path = tmp_path / "items"
    path.write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert score("--items", "-" if standard_input else str(path), "--json") == 0
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert [json.loads(line)["item"] for line in lines] == items


@pytest.mark.parametrize("flags", [["--labels", "yes,no,yes"], ["--label-sequences", "7,9,7"]])
def test_equal_labels(items_file, capsys, flags):
    """One object cannot hold both; the table shows both."""
    words = ["score", "demo", "--query", QUERY, "--items", items_file, *flags]
    assert main([*words, "--json"]) == 2
    label = "yes" if flags[0] == "--labels" else "7"
    told = capsys.readouterr().err
    assert told == f"gpuscore: --json needs labels that differ, and {label} is there twice\n"
    assert main([*words, "--max-batch-tokens", "512"]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[1] == head.split()[3]
    assert row.split()[1] == row.split()[3]


def test_small_scores_are_shown(items_file, capsys):
    """The model would never say the label; six places after the point would be zeros."""
    assert score("--items", items_file, "--labels", "yes, wooden chair") == 0
    for row in capsys.readouterr().out.splitlines()[1:]:
        assert 0 < float(row.split()[2]) < 1e-4


LONG = [" lamp", " steel lamp", " wooden chair"]


@pytest.mark.parametrize(
    ("flags", "names", "mean"),
    [
        (["--labels", ",".join(LONG)], LONG, False),
        (["--labels", ",".join(LONG), "--label-length-normalization", "mean"], LONG, True),
        (["--label-sequences", "1003,1034 1003,631  956"], ["1003", "1034 1003", "631 956"], False),
    ],
)
def test_labels_of_several_tokens(items_file, capsys, flags, names, mean):
    words = ["score", "demo", "--query", QUERY, "--max-batch-tokens", "512", "--json", *flags]
    assert main([*words, "--items", items_file]) == 0
    scores = [json.loads(line)["scores"] for line in capsys.readouterr().out.splitlines()]
    with Scorer("demo", max_batch_tokens=512) as scorer:
        options = {"label_length_normalization": "mean"} if mean else {}
        expected = scorer.score(QUERY, ITEMS, labels=LONG, **options).scores
    assert [*scores[0]] == names
    np.testing.assert_allclose([[*row.values()] for row in scores], expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --labels --label-sequences is required"),
        (["--labels", "a", "--label-sequences", "1"], "not allowed with argument --labels"),
        (["--label-sequences", "1 x"], "must be token ids, such as '12 7,9'"),
        (["--label-sequences", "1,-2"], "must be token ids"),
    ],
)
def test_labels_are_given_once(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main(["score", "demo", "--query", QUERY, "--items", "-", *flags])
    assert message in capsys.readouterr().err


def test_standard_input(expected, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"A red lamp.")))
    assert score("--items", "-", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["scores"]["yes"] == pytest.approx(expected[1, 0], abs=1e-5)


def test_nothing_to_score(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert score("--items", "-", "--json") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("words", "temperature"), [([], 1.0), (["--temperature", "2"], 2.0)])
def test_a_softmax_over_the_labels_and_item_first(items_file, capsys, words, temperature):
    flags = ("--apply-softmax", *words, "--item-first")
    assert score("--items", items_file, "--json", *flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    asked = {"apply_softmax": True, "temperature": temperature, "item_first": True}
    with Scorer("demo", max_batch_tokens=512) as scorer:
        scorer.warmup()  # changes no score
        expected = scorer.score(QUERY, ITEMS, labels=["yes", "no"], **asked).scores
    got = [[line["scores"]["yes"], line["scores"]["no"]] for line in lines]
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("command", ["score", "batch"])
@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--temperature", "2"], 2, "--temperature needs --apply-softmax"),
        (["--apply-softmax", "--temperature", "0"], 2, "0 is not a positive, finite number"),
        (["--apply-softmax", "--temperature", "inf"], 2, "inf is not a positive, finite number"),
        (["--apply-softmax", "--temperature", "x"], 2, "x is not a positive, finite number"),
        (["--full-vocabulary"], 2, "--full-vocabulary"),
    ],
)
def test_refused_as_on_the_wire(tmp_path, capsys, command, flags, code, message):
    path = tmp_path / "in.jsonl"
    path.write_text('{"item": "a"}\n')
    words = {
        "score": ["--query", QUERY, "--items", str(path)],
        "batch": ["--input", str(path), "--output", str(tmp_path / "out.jsonl")],
    }
    try:
        ended = main([command, "demo", *words[command], "--labels", "yes,no", *flags])
    except SystemExit as stop:
        ended = stop.code
    assert ended == code
    assert message in capsys.readouterr().err


def test_a_progress_bar_on_long_input(tmp_path, capsys, monkeypatch):
    """The bar is shown only on a terminal and only on standard error."""
    path = tmp_path / "many.txt"
    path.write_text("A red lamp.\n" * 300)
    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        assert score("--items", str(path), "--json") == 0
    shown = ""
    with suppress(OSError):  # raised at the end, when the other side is closed
        while True:
            shown += os.read(parent, 65536).decode()
    os.close(parent)
    assert "300/300" in shown
    output = capsys.readouterr().out
    assert len(output.splitlines()) == 300
    assert "300/300" not in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--items", "/no/such/file"], 78, "No such file"),
        (["--items", "-", "--labels", "yes,"], 1, r"labels[1] is 0 tokens"),
        (["--items", "-", "--labels", "z" * 9000], 1, "less"),
        (["--items", "-", "--dtype", "bfloat16", "--max-model-len", "3"], 1, "the limit is 3"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, code, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"A red lamp.\n")))
    assert score(*arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("gpuscore: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('\x1b[2J\x9b\u202e' ~ 'no' * 900) }}",
            r"rendered: \x1b[2J\x9b\u202eno",
        ),
        ("{{ messages[0].content | reverse }}", "the document 0 times, not once"),
        (
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
            "query after the document",
        ),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path, capsys, template, message):
    """It gets one sentence with the file, the reason and the advice, and writes no control
    characters."""
    family = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a"}}
    config = json.loads((DEMO / "config.json").read_text()) | family
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert main(["info", str(tmp_path), "--family", "reward"]) == 78
    error = capsys.readouterr().err
    assert error.startswith("gpuscore: chat_template.jinja: the chat template ")
    assert message in error
    assert error.endswith("still scores query, items and labels\n")
    assert error.rstrip("\n").isprintable()


@pytest.mark.parametrize("command", [[], ["serve"], ["parity"], ["parity", "compare"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: gpuscore" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    asked = ["git", "-C", Path(__file__).parents[1], "rev-parse", "HEAD"]
    head = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    line = capsys.readouterr().out
    named = re.fullmatch(rf"gpuscore {__version__} \(commit ([0-9a-f]{{7,40}})(-dirty)?\)\n", line)
    assert head.startswith(named[1])


@pytest.mark.parametrize(
    "arguments",
    [["serve", "--prot", "1"], ["serve", "--port", "x"], ["score", "--port", "1"], ["tune"], []],
)
def test_unknown_words_are_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: gpuscore" in capsys.readouterr().err


def test_a_hub_name_offline(capsys):
    for command in ("info", "serve"):
        assert main([command, "Qwen/Qwen3-0.6B", "--revision", "main"]) == 78
        assert "hf download Qwen/Qwen3-0.6B" in capsys.readouterr().err
