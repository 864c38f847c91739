"""Checks of .github/workflows against the schema of GitHub's workflows."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github" / "workflows").glob("*.yml"))


def problems(path: Path) -> str:
    tool = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    return subprocess.run([*tool, path], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_valid(path):
    assert problems(path).startswith("ok")


def test_a_wrong_key_is_found(tmp_path):
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[-1].read_text().replace("runs-on:", "runs_on:", 1))
    assert "runs_on" in problems(wrong)
