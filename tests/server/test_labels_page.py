"""Promise: the page on labels of several tokens shows a request that works, and limits that
exist."""

import json
import re

from gpuscore.config import RequestLimits
from gpuscore.config.options import options
from gpuscore.errors import GpuscoreError
from support.pages import HOW_TO, compare_numbers

PAGE = HOW_TO.parent / "explanation/scores.md"
ANSWERED = re.compile(r"```http\nPOST (\S+)\n\n(\{.*?)```\n+```text\n(.*?)```", re.DOTALL)


def test_requests_are_answered_as_shown(demo):
    examples = ANSWERED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(examples) == 1
    for path, body, shown in examples:
        answer = demo.post(path, json=json.loads(body))
        assert answer.status_code == 200, answer.text
        compare_numbers(answer.text, shown)


def test_every_flag_and_code_exists():
    text = PAGE.read_text(encoding="utf-8")
    limits = {option.flag: option.default for option in options(RequestLimits)}
    named = {flag for flag in re.findall(r"`(--max-\S+?)`", text) if flag != "--max-batch-tokens"}
    assert named <= {*limits}
    assert f"A label has 1 to {RequestLimits().max_label_tokens} tokens" in text
    codes = {kind.code for kind in GpuscoreError.__subclasses__()}
    limits_section = text.partition("## Limits")[2].partition("\n## ")[0]
    shown = re.findall(r"`([a-z_]+)`", limits_section)
    assert len(shown) == 4
    assert {*shown} <= codes
