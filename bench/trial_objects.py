"""Kernels that CuTe's compiler made ahead of time: linked without a card, then loaded and timed.

What `nvidia-cutlass-dsl` (237 MB) compiles needs the CUDA runtime, `apache-tvm-ffi` (3 MB) and a
small static library of the compiler, which is linked into it. The card's machine needs no more.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from clock import on_device
from torch import Tensor

Kernel: TypeAlias = Callable[..., None]
Run: TypeAlias = Callable[[], Tensor]
TOLERANCE = 3e-2  # of a row's error; bfloat16's is below 1e-2
REPEAT = 32
# The one function that the compiler's shared library has and its static library has not.
ERRORS = """
extern const char *cudaGetErrorString(int code);
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int code) {
  const char *parts[] = {cudaGetErrorString(code)};
  raise("RuntimeError", parts, 1);
}
"""


def link(compiled: Any, path: Path) -> None:
    """Write a compiled kernel as a shared library, `path`."""
    import nvidia_cutlass_dsl

    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".o")
    compiled.export_to_c(object_file_path=str(made), function_name="kernel")
    (folder,) = nvidia_cutlass_dsl.__path__
    (library,) = Path(folder).glob("cu12/lib/libcuda_dialect_runtime_static.a")
    words = ["gcc", "-shared", "-fPIC", "-o", path, "-xc", "-", "-xnone", made, library]
    subprocess.run(words, input=ERRORS, text=True, check=True)
    made.unlink()
    print(f"{path}: {path.stat().st_size} bytes", flush=True)


def load(path: Path) -> Kernel:
    """Load a kernel, which takes tensors as they are."""
    import tvm_ffi

    major = str(torch.version.cuda).split(".")[0]
    # torch has loaded the runtime; its functions must be visible to what is loaded now.
    for library in (f"libcudart.so.{major}", tvm_ffi.libinfo.find_libtvm_ffi()):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(path)["kernel"]


def worst(result: Tensor, expected: Tensor) -> float:
    """Return the greatest error of a row, relative to the expected row."""
    wide = expected.double()
    return float(((result.double() - wide).norm(dim=-1) / wide.norm(dim=-1)).max())


def compare(
    name: str, ways: Mapping[str, Sequence[Run]], expected: Tensor, rows: Tensor, output: Path
) -> bool:
    """Check each way on the first of several sets of inputs (`rows` with what is expected, and all
    with ours), time those that are right in turn, and append a line of JSON for each but "ours".
    Return whether all were right."""
    results = {way: runs[0]() for way, runs in ways.items()}
    errors = {way: worst(result[rows], expected) for way, result in results.items()}
    apart = {way: worst(result, results["ours"]) for way, result in results.items()}
    right = {w for w in ways if errors[w] <= TOLERANCE and apart[w] <= TOLERANCE}
    del results
    seconds: dict[str, list[float]] = {way: [] for way in ways if way in right}
    for turn in range(REPEAT + 2):  # two to warm up
        for way, taken in seconds.items():
            runs = ways[way]
            taken.append(on_device(runs[turn % len(runs)], expected.device).seconds)
    ms = {way: 1e3 * statistics.median(taken[2:]) for way, taken in seconds.items()}
    with output.open("a") as file:
        for way in list(ways)[1:]:
            row = {"name": f"{way}, {name}", "ms": ms.get(way), "ours_ms": ms.get("ours")}
            row |= {"error": errors[way], "ours_error": errors["ours"], "from_ours": apart[way]}
            print(json.dumps(row), "" if way in right else "WRONG, not timed", flush=True)
            file.write(json.dumps(row) + "\n")
    return right == set(ways)


def main(
    trial: str, names: Sequence[str], compiled: Callable[[str], Any], run: Callable[..., bool]
) -> None:
    """Make all kernels of a trial, or check and time those of a folder with `run`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=Path, metavar="DIR", help="make the kernels; no card")
    parser.add_argument("--run", type=Path, metavar="DIR", help="check and time the kernels of DIR")
    parser.add_argument("--output", type=Path, help="file that gets a line of JSON per kernel")
    chosen = parser.parse_args()
    for name in names if chosen.compile else ():
        link(compiled(name), chosen.compile / f"{trial} {name}.so")
    torch.manual_seed(0)
    if chosen.run:
        kernels = {path.stem: load(path) for path in sorted(chosen.run.glob(f"{trial} *.so"))}
        with torch.inference_mode():
            sys.exit(not (kernels and run(kernels, chosen.output)))
