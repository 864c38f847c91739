"""Promise: the page on labels of several tokens shows requests, a program and a command that work,
and limits that exist."""

import io
import json
import re
import shlex

from gpuscore.commands.cli import main
from gpuscore.config import RequestLimits
from gpuscore.config.options import options
from gpuscore.errors import GpuscoreError
from support.pages import HOW_TO, blocks, compare_numbers, run_program

PAGE = HOW_TO / "labels.md"
ANSWERED = re.compile(r"```http\nPOST (\S+)\n\n(\{.*?)```\n+```text\n(.*?)```", re.DOTALL)


def test_requests_are_answered_as_shown(demo):
    examples = ANSWERED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(examples) == 2
    for path, body, shown in examples:
        answer = demo.post(path, json=json.loads(body))
        assert answer.status_code == 200, answer.text
        compare_numbers(answer.text, shown)


def test_the_program_prints_what_is_shown(tmp_path, capsys):
    (program,) = blocks(PAGE, "python")
    run_program(program, tmp_path)
    assert capsys.readouterr().out in blocks(PAGE, "text")


def test_the_command_prints_what_is_shown(monkeypatch, capsys):
    (line,) = blocks(PAGE, "sh")
    printf, command = line.replace("\\\n", "").split(" | gpuscore ")
    _, written = shlex.split(printf)
    lines = written.encode().decode("unicode_escape").encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(shlex.split(command)) == 0
    printed, shown = capsys.readouterr().out, blocks(PAGE, "text")[-1]
    number = re.compile(r"\d\.\d{6}")
    assert number.sub("#", printed) == number.sub("#", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    assert all(abs(float(score) - float(other)) < 1e-5 for score, other in pairs)


def test_every_flag_and_code_exists():
    text = PAGE.read_text(encoding="utf-8")
    limits = {option.flag: option.default for option in options(RequestLimits)}
    named = {flag for flag in re.findall(r"`(--max-\S+?)`", text) if flag != "--max-batch-tokens"}
    assert named <= {*limits}
    assert f"`--max-label-tokens`, {limits['--max-label-tokens']} by default" in text
    codes = {kind.code for kind in GpuscoreError.__subclasses__()}
    shown = re.findall(r"^\| .* \| `(\w+)`", text.partition("## Limits")[2], re.MULTILINE)
    assert len(shown) == 5
    assert {*shown} <= codes
