"""The library of this folder's C files: compiled for this CPU at every start, in a second.

Nothing is kept, so no library of another CPU, compiler or version can be taken for this one's.
OpenMP's functions stay undefined in it. They are found in the runtime that torch has loaded, so its
threads are torch's own.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FORMATS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16"}
FILES = ("rows.c", "products.c", "delta.c")
# Without contraction, a product and a sum round one after the other, as in torch; no flag lets the
# compiler change the order of sums.
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_LONGEST = 120  # seconds that a compiler may take
_SHOWN = 500  # characters of its message


class BuildError(Exception):
    """Raised if the library cannot be made here; the message tells why."""


def build(compiler: str, dtype: torch.dtype, sources: Path = SOURCES) -> ctypes.CDLL:
    """Compile and load the functions for rows of `dtype`, one of `FORMATS`.

    Args:
        compiler: a C compiler that takes GCC's flags.
        dtype: of the rows.
        sources: the folder with the files.

    Raises:
        BuildError: the compiler fails, or its result cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="gpuscore-") as folder:
        library = Path(folder, "rows.so")
        compiled = [str(Path(folder, f"{name}.o")) for name in FILES]
        for name, target in zip(FILES, compiled, strict=True):
            _run(compiler, *FLAGS, f"-D{FORMATS[dtype]}", "-c", str(sources / name), "-o", target)
        _run(compiler, "-shared", *compiled, "-lm", "-o", str(library))
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(f"what {compiler} has compiled cannot be loaded: {error}") from error


def _run(*command: str) -> None:
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=_LONGEST,
            text=True,
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(
            f"{command[0]} failed with exit code {error.returncode}: {error.stdout[:_SHOWN]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not run: {error}") from error
