"""Blocks of documentation pages, their requests, and the numbers that they show."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
TASKS = ROOT / "docs" / "tasks"
DIALECTS = ROOT / "docs" / "dialects"
HERE = "http://127.0.0.1:8000"  # the server of the pages
ROUTE = re.compile(r"`(?:GET |POST )?(/(?:v1/|v2/)?[a-z_]+(?:/[a-z]+)?)`")
NOT_THERE = re.compile(r"^- \*\*Not there:\*\* (.*?\.)\n(?=- |\n)", re.DOTALL | re.MULTILINE)
# A request as a command, and the answer that follows it in the same section, if there is one.
COMMAND = re.compile(
    r"curl -s http://127.0.0.1:8000(/\S+) [^']*'[^']*' -d '([^']*)'\n```\n"
    r"(?:(?:(?!```)[^#])*?```(?:json|text)\n([{[].*?)```)?",
    re.DOTALL,
)
SERVED = re.compile(r"make serve(?: MODEL=([^\s`]+))?")
NUMBER = re.compile(r"-?\d+(?:\.(\d+))?(?:e-\d+)?")


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks in a language, in their order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class ShownRequest:
    """A request that README or a task shows as a command; its answer may be shortened."""

    page: str
    path: str
    body: dict[str, Any]
    answer: str | None


def shown_requests(real: bool) -> list[ShownRequest]:
    """Return the requests to the real model, or else the others: a request is to the server that
    its page started last."""
    pages = [ROOT / "README.md", *sorted(TASKS.glob("*.md"))]
    return [
        ShownRequest(page.stem, shown[1], json.loads(shown[2]), shown[3])
        for page in pages
        for text in [page.read_text(encoding="utf-8")]
        for shown in COMMAND.finditer(text)
        if (["", *SERVED.findall(text[: shown.start()])][-1] == "smollm2") == real
    ]


def other_routes(text: str) -> set[str]:
    """Return the routes that a page names because other servers have them and this one does not.

    A page lists them in one sentence; what stands in parentheses says what to use instead.
    """
    parts = [re.sub(r"\(.*?\)", "", part, flags=re.DOTALL) for part in NOT_THERE.findall(text)]
    return {route for part in parts for route in ROUTE.findall(re.split(r"\.\s", part)[0])}


def numbers(text: str) -> Iterator[tuple[float, float]]:
    """Yield a JSON text's numbers outside of strings, with half a unit of their last digits."""
    for number in NUMBER.finditer(re.sub(r'"[^"]*"', "", text)):
        exponent = float(number[0].partition("e")[2] or 0)
        yield float(number[0]), 0.5 * 10 ** (exponent - len(number[1] or ""))


def compare_numbers(answer: str, shown: str) -> None:
    """Assert that the numbers shown are an answer's, in its order; some may be left out."""
    rest = numbers(answer)
    for expected, half in numbers(shown):
        assert any(abs(got - expected) <= 1.01 * half for got, _ in rest), expected


def run_program(text: str, directory: Path) -> None:
    """Run a page's program in this process, which has imported torch."""
    file = directory / "program.py"
    file.write_text(text, encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")


def run_example(command: str, monkeypatch, capsys) -> str:
    """Run a page's command of a program in examples/, in this process; return what it prints."""
    program, *words = shlex.split(command.split("-P ")[1])
    monkeypatch.setattr(sys, "argv", [program, *words])
    run_program((ROOT / program).read_text(), Path())
    return capsys.readouterr().out
