"""The library of this folder's C files: compiled for this CPU at every start, in a second.

Nothing is kept, so no library of another CPU, compiler or version can be taken for this one's. An
image without a compiler has libraries for several levels of CPUs, which `build_ahead` has compiled
beside the sources; their names have a digest of what they were compiled from.

OpenMP's functions stay undefined in a library. They are found in the runtime that torch has loaded,
so its threads are torch's own.
"""

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
FORMATS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
FILES = ("rows.c", "products.c", "delta.c", "attention.c")
# Without contraction, a product and a sum round one after the other, as in torch; no flag lets the
# compiler change the order of sums.
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-fopenmp", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
AHEAD = SOURCES / "built"
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt")
_V4 = (*_V3, "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
# Levels of x86-64's psABI, and instructions beyond one, the best first, with features as
# torch.cpu.get_capabilities names them.
LEVELS = {
    "x86-64-v4+avx512bf16": (*_V4, "avx512_bf16"),
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
}
_LONGEST = 120  # seconds that a compiler may take
_SHOWN = 500  # characters of its message


class BuildError(Exception):
    """Raised if the library cannot be made here; the message tells why."""


def build(compiler: str, dtype: torch.dtype, sources: Path = SOURCES) -> ctypes.CDLL:
    """Compile and load the functions for rows of `dtype`, one of `FORMATS`.

    Args:
        compiler: a C compiler that takes GCC's flags.
        dtype: the dtype of the rows.
        sources: the folder with the files.

    Raises:
        BuildError: the compiler fails, or its result cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="gpuscore-") as folder:
        library = Path(folder, "rows.so")
        compile_library(compiler, "native", dtype, sources, library=library)
        return load(library)


def load(library: Path) -> ctypes.CDLL:
    """Load a library; raise BuildError if that fails."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"what was compiled cannot be loaded: {error}") from error


def declare(library: ctypes.CDLL, arguments: Mapping[str, Any]) -> None:
    """Set the types of the arguments of a library's functions, which return nothing."""
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None


def check(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, contiguous: bool = True
) -> None:
    """Raise ValueError for a tensor that a function in C would read wrongly; without `contiguous`
    rows need not follow each other."""
    dense = x.is_contiguous() if contiguous else shape[-1] < 2 or x.stride(-1) == 1
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu" or not dense:
        raise ValueError(
            f"a tensor must be {dtype} {shape} on a CPU, in order; got {x.dtype} "
            f"{tuple(x.shape)} on {x.device} with strides {x.stride()}"
        )


def build_ahead(compiler: str, folder: Path = AHEAD) -> list[Path]:
    """Compile for every level and format, and return the libraries; raise BuildError."""
    folder.mkdir(exist_ok=True)
    libraries = {
        _ahead(folder, level, dtype): (level, dtype) for level in LEVELS for dtype in FORMATS
    }
    for library, (level, dtype) in libraries.items():
        compile_library(compiler, level, dtype, SOURCES, library=library)
    return [*libraries]


def built_ahead(
    dtype: torch.dtype, folder: Path = AHEAD, has: Mapping[str, Any] | None = None
) -> Path | None:
    """Return the best library for a CPU that was compiled ahead from these sources, or None.

    Args:
        dtype: the dtype of the rows.
        folder: holds the libraries.
        has: the CPU's features, by torch's names; None: this CPU's.
    """
    known = torch.cpu.get_capabilities() if has is None else has
    for level, features in LEVELS.items():
        library = _ahead(folder, level, dtype)
        if all(known.get(name) for name in features) and library.exists():
            return library
    return None


def _ahead(folder: Path, level: str, dtype: torch.dtype) -> Path:
    sources = sorted(SOURCES.glob("*.[ch]"))
    parts = (*FLAGS, *(source.read_text(encoding="utf-8") for source in sources))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return folder / f"{FORMATS[dtype].lower()}-{level}-{digest}.so"


def compile_library(
    compiler: str,
    machine: str,
    dtype: torch.dtype,
    sources: Path,
    library: Path,
    more: Sequence[str] = (),
) -> None:
    """Compile the sources for a `-march` of the compiler's, or a level, with `more` flags."""
    level, *beyond = machine.split("+")
    instructions = f"-march={level}", *(f"-m{name}" for name in beyond)
    flags = (*FLAGS, *instructions, f"-D{FORMATS[dtype]}", *more)
    with tempfile.TemporaryDirectory(prefix="gpuscore-") as folder:
        compiled = [str(Path(folder, f"{name}.o")) for name in FILES]
        for name, target in zip(FILES, compiled, strict=True):
            run(compiler, *flags, "-c", str(sources / name), "-o", target)
        run(compiler, *more, "-shared", *compiled, "-lm", "-o", str(library))


def run(*command: str) -> None:
    """Run a command; raise BuildError with its message if it fails or takes too long."""
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
