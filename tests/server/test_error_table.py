"""Promise: every row of the contract's error table is provoked by a test, over a real server."""

import ast
from pathlib import Path

from gpuscore import errors


def noted(path):
    """First arguments of `table`, and all of `covers`, in a file of tests."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("covers", "table"):
            codes = node.args if node.func.id == "covers" else node.args[:1]
            yield from (code.value for code in codes)


def test_every_code_is_provoked():
    known = {
        error.code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.GpuscoreError)
    }
    files = Path(__file__).parent.glob("test_*.py")
    assert known == {code for path in files for code in noted(path)}
