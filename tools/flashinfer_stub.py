"""Writes the signatures of FlashInfer's wrapper that gpuscore calls as a type stub, so that mypy
binds our calls to the release that the CUDA image installs. Needs no GPU and imports nothing.

    python -P tools/flashinfer_stub.py docker/locks/cuda.txt   # after a new release
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

STUB = Path(__file__).parents[1] / "stubs" / "flashinfer" / "__init__.pyi"
FILE, CLASS = "flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper"
METHODS = ("__init__", "plan", "run")
HEAD = '''"""Written by tools/flashinfer_stub.py from flashinfer-python=={version}; do not edit."""

from typing import Any, Dict, List, Literal, Optional, Tuple, Union, overload

import torch
'''


def main(lock: Path) -> None:
    """Download the release that the lock file names, and write its stub."""
    match = re.search(r"^flashinfer-python==(\S+)", lock.read_text(), re.MULTILINE)
    if match is None:
        raise LookupError(f"{lock} names no flashinfer-python")
    version = match[1]
    with TemporaryDirectory() as folder:
        asked = ("download", "--quiet", "--no-deps", "--dest", folder)
        wanted = f"flashinfer-python=={version}"
        subprocess.run([sys.executable, "-m", "pip", *asked, wanted], check=True)
        with ZipFile(next(Path(folder).glob("*.whl"))) as files:
            lines = stub_of(files.read(FILE).decode(), CLASS)
    STUB.write_text("\n".join([HEAD.format(version=version), "", *lines]) + "\n")


def stub_of(source: str, name: str) -> Iterator[str]:
    """Yield the lines of a class's stub; raise LookupError if the class or a method is missing."""
    classes = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    if not classes:
        raise LookupError(f"the wheel has no class {name}")
    yield f"class {name}:"
    for wanted in METHODS:
        methods = [
            n for n in classes[0].body if isinstance(n, ast.FunctionDef) and n.name == wanted
        ]
        if not methods:
            raise LookupError(f"{name} has no method {wanted}")
        several = len(methods) > 1  # overloads, then the implementation, which callers do not see
        for method in methods[:-1] if several else methods:
            if several:
                yield "    @overload"
            yield f"    def {wanted}({_arguments(method)}) -> {_result(method)}: ..."


def _arguments(method: ast.FunctionDef) -> str:
    """Return a method's parameters, those without a type as Any."""
    every = method.args
    for argument in (*every.args[1:], *every.kwonlyargs, every.vararg, every.kwarg):
        if argument is not None and argument.annotation is None:
            argument.annotation = ast.Name("Any")
    return ast.unparse(every)


def _result(method: ast.FunctionDef) -> str:
    if method.returns is None:
        return "None" if method.name == "__init__" else "Any"
    return ast.unparse(method.returns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
