"""Kernels of CuTe's compiler for Hopper: compiled once, kept, and loaded without the compiler.

    python -P -m gpuscore_kernels.ahead DIR MODULE SIZE ...     # no card; the extra `hopper`

A module makes its kernel with `compile_kernel(*sizes)`. The compiler is 237 MB and a kernel takes
it 8 seconds, so the result is linked into a shared library, which needs torch's CUDA runtime and
`apache-tvm-ffi` only. It is kept beside Triton's compiled code (`TRITON_CACHE_DIR`), under a name
with the sizes and a digest of all that it was made of.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gpuscore_kernels.row_functions.build import BuildError, run

Kernel: TypeAlias = Callable[..., None]

# Kernels use the packages' own functions, so no other version will do.
PACKAGES = {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}
# An H100's, so that none has to be here.
ARCH = {
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "QUACK_ARCH": "90",
    "QUACK_CACHE_ENABLED": "0",
}
# The one function that the compiler's shared library has and its static library has not.
ERRORS = """
extern const char *cudaGetErrorString(int code);
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int code) {
  const char *parts[] = {cudaGetErrorString(code)};
  raise("RuntimeError", parts, 1);
}
"""


def why_not(module: str, *sizes: int) -> str | None:
    """Return why `load` cannot succeed here, as far as packages tell, or None."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return (
            "apache-tvm-ffi is not installed here; pip install apache-tvm-ffi, or the extra hopper"
        )
    library = library_of(module, sizes)
    missing = [f"{name}=={wanted}" for name, wanted in PACKAGES.items() if _has(name) != wanted]
    if library.exists() or not missing:
        return None
    return (
        f"there is no {library}, and packages of the extra hopper are missing that compile it: "
        f"pip install {' '.join(missing)}"
    )


@functools.cache
def load(module: str, *sizes: int) -> Kernel:
    """Return a module's kernel for these sizes, which is compiled if none is kept.

    It takes tensors as they are and launches on torch's current stream.

    Raises:
        BuildError: packages are missing, or the compilation fails.
    """
    if (reason := why_not(module, *sizes)) is not None:
        raise BuildError(reason)
    library = library_of(module, sizes)
    if not library.exists():
        # In a process of its own, whose packages a module may change for the compilation.
        words = sys.executable, "-P", "-m", __name__, str(library.parent), module
        run(*words, *map(str, sizes))
    import tvm_ffi

    major = str(torch.version.cuda).split(".")[0]
    # torch has loaded the runtime; its functions must be visible to what is loaded now.
    for name in (f"libcudart.so.{major}", tvm_ffi.libinfo.find_libtvm_ffi()):
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    kernel: Kernel = tvm_ffi.load_module(library)["kernel"]
    return kernel


def library_of(module: str, sizes: Sequence[int], folder: Path | None = None) -> Path:
    """Return where a kernel's library is, in Triton's folder unless another is given."""
    from triton import knobs  # only where Triton is

    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no module {module}")
    made_of = Path(spec.origin).read_text(encoding="utf-8"), ERRORS, str(PACKAGES), str(ARCH)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    name = "-".join([module.removeprefix("gpuscore_kernels."), *map(str, sizes), digest])
    return (folder or Path(knobs.cache.dir)) / f"{name}.so"


def compile_ahead(folder: Path, module: str, *sizes: int) -> Path:
    """Compile a kernel and keep its library in a folder."""
    os.environ |= ARCH
    compiled = importlib.import_module(module).compile_kernel(*sizes)
    library = library_of(module, sizes, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        _link(compiled, linked := Path(made, library.name))
        linked.replace(library)  # whole at once: other processes look for it
    return library


def _link(compiled: Any, library: Path) -> None:
    """Link a compiled kernel with what it needs of the compiler's own library."""
    import nvidia_cutlass_dsl

    made, errors = library.with_suffix(".o"), library.with_suffix(".c")
    compiled.export_to_c(object_file_path=str(made), function_name="kernel")
    errors.write_text(ERRORS, encoding="utf-8")
    (folder,) = nvidia_cutlass_dsl.__path__
    (static,) = Path(folder).glob("cu12/lib/libcuda_dialect_runtime_static.a")
    compiler = os.environ.get("CC") or "gcc"
    run(compiler, "-shared", "-fPIC", "-o", *map(str, (library, errors, made, static)))


def _has(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(compile_ahead(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
