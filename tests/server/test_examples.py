"""Promise: the programs in examples/ print what their pages show, against the demo model."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# The lines that they print, or how those begin.
PRINTED = {
    "rerank.py": ["0.9810  A wooden garden chair in blue.", "0.0785  A blue wool scarf."],
    "evaluate.py": ["P(rel=2)@1 0.6667", "RR@3 1.0000", "nDCG@3 0.9532"],
    "many_queries.py": ["a red lamp: A red lamp.", "a red chair: A red chair."],
    "offline.py": ["0.0124  A red steel lamp.", "0.9810  A wooden garden chair in blue."],
}
# Run on their pages' files: by test_how_to.py, and by real_model/test_pages.py.
OF_PAGES = {"labelled.py", "classify_many.py", "reviews.py", "threshold.py"}


def test_every_example_is_run_and_described():
    names = {file.name for file in EXAMPLES.glob("*.py")}
    assert names == set(PRINTED) | OF_PAGES
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in names)


def arguments_of(name, demo):
    return [] if name == "offline.py" else [str(demo.base_url)]


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_examples_print_what_is_shown(demo, small_batches, name, monkeypatch, capsys):
    """They run in this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [name, *arguments_of(name, demo)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(PRINTED[name])] == PRINTED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_examples_run_as_a_reader_runs_them(demo, name):
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / name), *arguments_of(name, demo)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[: len(PRINTED[name])] == PRINTED[name]
