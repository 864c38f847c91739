"""Blocks of documentation pages, and the numbers that they show."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
ROUTE = re.compile(r"`(?:GET |POST )?(/(?:v1/|v2/)?[a-z_]+(?:/[a-z]+)?)`")
NOT_THERE = re.compile(r"^- \*\*Not there:\*\* (.*?\.)\n(?=- |\n)", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.(\d+))?(?:e-\d+)?")


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks in a language, in their order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def other_routes(text: str) -> set[str]:
    """Return the routes that a page names because other servers have them and this one does not.

    Each list is a sentence; what stands in parentheses says what to use instead.
    """
    parts = [re.sub(r"\(.*?\)", "", part, flags=re.DOTALL) for part in NOT_THERE.findall(text)]
    return {route for part in parts for route in ROUTE.findall(re.split(r"\.\s", part)[0])}


def numbers(text: str) -> Iterator[tuple[float, float]]:
    """Yield a JSON text's numbers outside of strings, each with the half of its last digit."""
    for found in NUMBER.finditer(re.sub(r'"[^"]*"', "", text)):
        exponent = float(found[0].partition("e")[2] or 0)
        yield float(found[0]), 0.5 * 10 ** (exponent - len(found[1] or ""))


def compare_numbers(answer: str, shown: str) -> None:
    """Assert that the numbers shown are those of an answer, in its order; some may be left out."""
    rest = numbers(answer)
    for want, half in numbers(shown):
        assert any(abs(got - want) <= 1.01 * half for got, _ in rest), want


def run_program(text: str, directory: Path) -> None:
    """Run a page's program in this process, which has imported torch."""
    file = directory / "program.py"
    file.write_text(text, encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")
