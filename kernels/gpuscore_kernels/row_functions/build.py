"""Compiles this folder's C files to a library for this CPU, at every start, in a second.

The library is not kept, so one of another CPU, compiler or version can never be loaded by mistake.
For an image without a compiler, `build_ahead` puts libraries for several levels of CPUs beside the
sources. Their file names hold a digest of the sources and flags.

A library does not link OpenMP. It finds OpenMP's functions in the runtime that torch has loaded,
and so uses torch's threads.
"""

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
FORMATS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
FILES = ("rows.c", "products.c", "delta.c", "attention.c")
# -ffp-contract=off rounds after the product and again after the sum, as torch does. No flag allows
# the compiler to change the order of sums.
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-fopenmp", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
PREBUILT = SOURCES / "built"
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt")
_V4 = (*_V3, "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
# Levels of CPUs, the best one first: a level of the x86-64 psABI, with more instructions after a +.
# Each has the features that it needs, by their names in torch.cpu.get_capabilities.
LEVELS = {
    "x86-64-v4+avx512bf16": (*_V4, "avx512_bf16"),
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
}
# Of arguments: an address, a size, a number of float32, a switch or number of threads.
TYPES = {"P": c_void_p, "N": c_int64, "F": c_float, "I": c_int32}
_TIMEOUT = 120  # seconds after which a compiler is stopped
_SHOWN = 500  # characters of its message that are shown


class BuildError(Exception):
    """Raised if a library cannot be compiled or loaded here; the message says why."""


def build(compiler: str, dtype: torch.dtype, sources: Path = SOURCES) -> ctypes.CDLL:
    """Compile and load the functions for rows of `dtype`, one of `FORMATS`.

    Args:
        compiler: command of a C compiler that takes GCC's flags.
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
        raise BuildError(f"the compiled library cannot be loaded: {error}") from error


def declare(library: ctypes.CDLL, arguments: Mapping[str, str]) -> None:
    """Declare a library's functions, which return nothing: `TYPES` of their arguments, in order."""
    for name, letters in arguments.items():
        function = getattr(library, name)
        function.argtypes = [TYPES[letter] for letter in letters]
        function.restype = None


def call(function: Any, tensors: Sequence[Tensor | None], *numbers: float) -> None:
    """Call a function with the tensors' addresses, the numbers, and torch's number of threads."""
    addresses = (None if x is None else x.data_ptr() for x in tensors)
    function(*addresses, *numbers, torch.get_num_threads())


def check_tensor(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, contiguous: bool = True
) -> None:
    """Raise ValueError for a tensor that a C function would misread.

    Without `contiguous`, there may be gaps between rows.
    """
    dense = x.is_contiguous() if contiguous else shape[-1] < 2 or x.stride(-1) == 1
    if x.shape != shape or x.dtype != dtype or x.device.type != "cpu" or not dense:
        raise ValueError(
            f"a tensor must be {dtype} {shape} on a CPU, contiguous; got {x.dtype} "
            f"{tuple(x.shape)} on {x.device} with strides {x.stride()}"
        )


def build_ahead(compiler: str, folder: Path = PREBUILT) -> list[Path]:
    """Compile a library for every level and dtype; return their paths, or raise BuildError."""
    folder.mkdir(exist_ok=True)
    libraries = {
        _prebuilt(folder, level, dtype): (level, dtype) for level in LEVELS for dtype in FORMATS
    }
    for library, (level, dtype) in libraries.items():
        compile_library(compiler, level, dtype, SOURCES, library=library)
    return [*libraries]


def find_prebuilt(
    dtype: torch.dtype, folder: Path = PREBUILT, cpu_features: Mapping[str, Any] | None = None
) -> Path | None:
    """Return the best prebuilt library of these sources that a CPU can run; None if there is none.

    Args:
        dtype: the dtype of the rows.
        folder: holds the libraries.
        cpu_features: the CPU's features, by torch's names; None = those of this CPU.
    """
    known = torch.cpu.get_capabilities() if cpu_features is None else cpu_features
    for level, features in LEVELS.items():
        library = _prebuilt(folder, level, dtype)
        if all(known.get(name) for name in features) and library.exists():
            return library
    return None


def _prebuilt(folder: Path, level: str, dtype: torch.dtype) -> Path:
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
    extra_flags: Sequence[str] = (),
) -> None:
    """Compile the sources to `library`; `machine` is a level, or what `-march` takes."""
    level, *beyond = machine.split("+")
    instructions = f"-march={level}", *(f"-m{name}" for name in beyond)
    flags = (*FLAGS, *instructions, f"-D{FORMATS[dtype]}", *extra_flags)
    with tempfile.TemporaryDirectory(prefix="gpuscore-") as folder:
        compiled = [str(Path(folder, f"{name}.o")) for name in FILES]

        def compile_file(name: str, target: str) -> None:
            run(compiler, *flags, "-c", str(sources / name), "-o", target)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_file, FILES, compiled))  # raises the error of a file
        run(compiler, *extra_flags, "-shared", *compiled, "-lm", "-o", str(library))


def run(*command: str) -> None:
    """Run a command; raise BuildError with its message if it fails or takes too long."""
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=_TIMEOUT,
            text=True,
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(
            f"{command[0]} failed with exit code {error.returncode}: {error.stdout[:_SHOWN]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not run: {error}") from error
