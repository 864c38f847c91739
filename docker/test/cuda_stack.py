"""Checks of what the CUDA image with its own lock contains, in its container, without a GPU.

Only the driver's libraries come from the host, so all others must load, and everything that is
compiled at run time (Triton's kernels and its C code, FlashInfer's CUDA code) must compile.
"""

import json
from collections.abc import Mapping
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

from container import Container
from workshop import REFUSED, expect, step

DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")  # libraries of the host's driver
# Networks between machines and launchers of jobs there: NVSHMEM's and cuFile's plugins for them.
CLUSTER = ("libmlx5.so", "libfabric.so", "libucs.so", "libmpi.so", "libpmix.so", "liboshmem.so")
LARGE = 50e6  # bytes of a package that is listed by itself

# Run by the container's Python: imports the stack, then loads every library of torch and NVIDIA.
LOAD = """
import ctypes, json, pathlib, sysconfig
import torch
site = pathlib.Path(sysconfig.get_path("purelib"))
mapped = {line.split()[-1] for line in open("/proc/self/maps") if str(site) in line}
import flashinfer, triton
from gpuscore.backends.torch.attention import flashinfer as ours, triton as kernels
flashinfer.BatchPrefillWithPagedKVCacheWrapper
libraries = sorted({*site.glob("torch/lib/*.so*"), *site.glob("nvidia/**/*.so*")})
refused = {}
for path in libraries:
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        refused[path.name] = str(error)
print(json.dumps({
    "versions": {m.__name__: m.__version__ for m in (torch, triton, flashinfer)},
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(),
    "loaded by torch": sorted(name.rsplit("/", 1)[1] for name in mapped if "/nvidia/" in name),
    "libraries": len(libraries),
    "refused": refused,
}))
"""

# Compiles Triton's C code against the headers of its wheel and of Python, and links it: the symbols
# of the driver stay undefined, as they may in a shared library.
LAUNCHER = """
import pathlib, subprocess, sysconfig, triton
nvidia = pathlib.Path(triton.__file__).parent / "backends" / "nvidia"
python = sysconfig.get_paths("posix_prefix")["include"]
subprocess.run(["gcc", nvidia / "driver.c", "-O3", "-shared", "-fPIC", "-I", nvidia / "include",
                "-I", python, "-o", "/tmp/driver.so"], check=True)
"""

# Compiles CUDA code as FlashInfer does, with the headers that it brings, for the architectures of
# our own kernels, and links it.
NVCC = """
import os, pathlib, subprocess
from flashinfer.jit.env import CCCL_INCLUDE_DIRS
home = pathlib.Path(os.environ["CUDA_HOME"])
pathlib.Path("/tmp/twice.cu").write_text('''
#include <cuda_bf16.h>
#include <cuda_runtime.h>
__global__ void twice(__nv_bfloat16* x) { x[threadIdx.x] = __hadd(x[threadIdx.x], x[threadIdx.x]); }
extern "C" int start(__nv_bfloat16* x) { twice<<<1, 32>>>(x); return cudaGetLastError(); }
''')
code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("80", "89", "90a", "120a")]
code += [f"-I{folder}" for folder in CCCL_INCLUDE_DIRS]
subprocess.run([home / "bin" / "nvcc", "-O3", "-Xcompiler", "-fPIC", *code, "-c", "/tmp/twice.cu",
                "-o", "/tmp/twice.o"], check=True)
subprocess.run(["g++", "-shared", "/tmp/twice.o", "-L", home / "lib64", "-lcudart",
                "-o", "/tmp/twice.so"], check=True)
"""


def check_device_is_needed(container: Container, without_cuda: bool) -> None:
    """Check that the image does not start without a GPU, and that one sentence says why."""
    container.start("info", "demo")
    code, output = container.wait(120), container.output()
    expect(code == REFUSED, f"exit code {code}:\n{output}")
    said = [line for line in output.splitlines() if line.startswith("gpuscore: ")]
    expect(len(said) == 1, f"not one error:\n{output}")
    why = "is built without CUDA" if without_cuda else "needs a driver of version 580 or newer"
    for part in ("--device cuda: this torch sees no CUDA device: ", why):
        expect(part in said[0], f"the message says: {said[0]}")
    print(f"  {said[0]}")


def check_compiler(container: Container) -> None:
    """Check that a C module can be compiled and loaded as Triton does, and where caches are."""
    code = (
        "import ctypes, os, pathlib, subprocess, sysconfig\n"
        "cache = pathlib.Path(os.environ['TRITON_CACHE_DIR']); cache.mkdir()\n"
        "source = pathlib.Path('/tmp/stub.c')\n"
        "source.write_text('#include <Python.h>\\nint answer(void) { return PY_MAJOR_VERSION; }')\n"
        "include = sysconfig.get_paths('posix_prefix')['include']\n"
        "subprocess.run(['gcc', source, '-O3', '-shared', '-fPIC', '-I', include,\n"
        "                '-o', cache / 'stub.so'], check=True)\n"
        "assert ctypes.CDLL(str(cache / 'stub.so')).answer() == 3\n"
        "assert os.environ['FLASHINFER_WORKSPACE_BASE'].startswith('/cache/')\n"
    )
    done = container.execute("python", "-c", code)
    expect(done.returncode == 0, done.stderr)


def check_own_lock(container: Container) -> None:
    """Check what only the CUDA image with its own lock has; no server runs meanwhile."""
    with step("cuda: sizes of packages"):
        (site,) = (container.root / "opt" / "gpuscore").glob("lib/python*/site-packages")
        print_sizes(site)
    with step("cuda: imports and libraries"):
        check_stack(container)
    with step("cuda: Triton's C code and CUDA code"):
        container.run_instead("python", "-c", LAUNCHER, seconds=300)
        container.run_instead("python", "-c", NVCC, seconds=600)


def check_stack(container: Container) -> None:
    """Check that torch, Triton, FlashInfer and our backends are imported and the libraries load.

    Without a GPU there is no driver, so a library may be refused for lack of the driver's,
    and plugins for clusters for lack of theirs.
    """
    output = container.run_instead("python", "-c", LOAD, seconds=600)
    facts = json.loads(output.splitlines()[-1])
    print(f"  {facts['versions']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}")
    print(f"  torch's import loads {', '.join(facts['loaded by torch'])}")
    refused = facts["refused"]
    bad = {name: why for name, why in refused.items() if not why.startswith(DRIVER + CLUSTER)}
    expect(not bad, "\n".join(f"{name} cannot be loaded: {why}" for name, why in bad.items()))
    print(f"  {facts['libraries']} libraries; not loaded here:")
    for name, why in refused.items():
        print(f"    {name}: {why}")


def print_sizes(site: Path) -> None:
    """Print how large the packages of a site-packages folder are."""
    sizes = package_sizes(site)
    large = {name: size for name, size in sizes.items() if size >= LARGE}
    for name in sorted(large, key=large.__getitem__, reverse=True):
        print(f"  {large[name] / 1e6:6.0f} MB {name}")
    rest = sum(sizes.values()) - sum(large.values())
    print(f"  {rest / 1e6:6.0f} MB {len(sizes) - len(large)} others")


def package_sizes(site: Path) -> Mapping[str, int]:
    """Return the bytes of the files of each package that are there."""
    sizes = {}
    for folder in site.glob("*.dist-info"):
        package: Distribution = PathDistribution(folder)
        paths = [Path(str(package.locate_file(entry))) for entry in package.files or ()]
        sizes[package.metadata["Name"]] = sum(
            path.stat().st_size for path in paths if path.is_file()
        )
    return sizes
