"""Promise: the `gpuscore` command explains itself and reports errors in one sentence.

It runs in this process where that makes no difference.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import gpuscore
from gpuscore import __version__
from gpuscore.commands.cli import main
from support import programs
from support.serving import QUICK

DEMO = Path(gpuscore.__file__).parent / "demo"


def batch(tmp_path, *flags):
    """Run `gpuscore batch` on one row."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"item": "A red lamp."}\n')
    files = ("--input", path, "--output", tmp_path / "out.jsonl")
    return programs.run("batch", "demo", *files, *QUICK, *flags)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--input", "/no/such/file.jsonl"], 78, "No such file"),
        (["--labels", "yes,"], 1, r"labels[1] is 0 tokens"),
        (["--labels", "z" * 9000], 1, "the limit is 32"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, flags, code, message):
    done = batch(tmp_path, *flags)
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert message in line
    assert line.startswith("gpuscore: ")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('\x1b[2J\x9b\u202e' ~ 'no' * 900) }}",
            r"rendered: \x1b[2J\x9b\u202eno",
        ),
        ("{{ messages[0].content | reverse }}", "the document 0 times, not once"),
        (
            "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
            "query twice side by side",
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
    [["serve", "--prot", "1"], ["serve", "--port", "x"], ["parity", "--port", "1"], ["tune"], []],
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
