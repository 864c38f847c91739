"""`gpuscore doctor`: checks of this machine, each with its finding and a remedy."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from packaging.requirements import Requirement

from gpuscore import __version__
from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.common.plan import mebibytes, nvidia_device
from gpuscore.backends.torch.compiler import cc
from gpuscore.backends.torch.devices import DRIVERS, choose_device, computes_natively
from gpuscore.config import ModelConfig, ServerConfig
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.server.http.address import bind
from gpuscore.server.http.headers import read_api_keys
from gpuscore.system.extras import install
from gpuscore_kernels.row_functions.build import find_prebuilt

LEAST_MEMORY = 2 * 2**30  # bytes; the weights of Qwen3-0.6B in float32 take 2.2 GiB
LEAST_DISK = 5 * 2**30
DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Extras that users install.
EXTRAS = ("batch", "jax", "otel", "parity", "ray", "serve")
Level: TypeAlias = Literal["OK", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Args:
        level: a problem keeps a server from starting; a warning makes it slower or limits it.
        state: what was found.
        remedy: what to do; empty if nothing is needed.
    """

    name: str
    level: Level
    state: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """The subject of the checks: the settings, and the kind of device, if one can be used."""

    model: ModelConfig
    server: ServerConfig
    device: str | None


def doctor(settings: Settings) -> int:
    """Print all findings; return 1 if there is a problem."""
    findings = list(examine(settings.make(ModelConfig), settings.make(ServerConfig)))
    _print(findings)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def examine(model: ModelConfig, server: ServerConfig) -> Iterator[Finding]:
    """Yield the findings, in the order in which a start depends on them."""
    device = _device(model)
    kind = None if device.level == "problem" else choose_device(model.device).type
    checked = Checked(model, server, kind)
    yield _python()
    yield from _installed()
    yield device
    for check in _CHECKS:
        yield from check(checked)


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.level:<7}  {finding.name:<{width}}  {finding.state}")
        if finding.remedy:
            print(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
    counts = {
        level: sum(finding.level == level for finding in findings)
        for level in ("warning", "problem")
    }
    print(
        "\n" + ", ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items())
    )


def _python() -> Finding:
    state = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("Python", "OK", state)
    return Finding("Python", "problem", state, "install a Python from 3.11 to 3.14")


def _installed() -> Iterator[Finding]:
    """Compare the installed packages with the requirements of gpuscore's package."""
    lines = requires("gpuscore") or []
    wrong = [line for line in map(unmet, lines) if line]
    if wrong:
        remedy = "install gpuscore again in a new virtual environment"
        yield Finding("packages", "problem", "; ".join(wrong), remedy)
    else:
        yield Finding("packages", "OK", f"gpuscore {__version__}, torch {version('torch')}")
    yield Finding("extras", "OK", ", ".join(f"{name} {_extra(name, lines)}" for name in EXTRAS))


def _extra(name: str, lines: Sequence[str]) -> str:
    """Return yes if an extra's requirements are met, or no with the unmet requirements."""
    conditional = (line for line in lines if "extra ==" in line)
    wrong = [reason for line in conditional if (reason := unmet(line, name))]
    return f"no ({'; '.join(wrong)})" if wrong else "yes"


def unmet(line: str, extra: str = "") -> str | None:
    """Return what is wrong about a requirement; None if it is met, or not part of this extra."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return None
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} is {installed}, supported: {requirement.specifier}"


def _device(model: ModelConfig) -> Finding:
    try:
        device = choose_device(model.device)
    except ConfigError as error:
        state, _, remedy = str(error).rpartition("; ")
        return Finding("device", "problem", state or str(error), remedy or "choose --device cpu")
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        unused = nvidia_device()
        if unused is not None:
            state = f"CPU, although {unused} is there"
            return Finding("device", "warning", state, "leave out --device cpu to use the GPU")
        return Finding("device", "OK", f"CPU with {cores} cores for this process")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("device", "OK", f"CUDA {torch.version.cuda}: {', '.join(names)}")


def _driver(checked: Checked) -> Iterator[Finding]:
    """Check NVIDIA's driver, where there is one."""
    if not DRIVER_FILE.is_file():
        return
    number = re.search(r"\b(\d+)\.\d+(?:\.\d+)?\b", DRIVER_FILE.read_text())
    cuda = torch.version.cuda
    if number is None or cuda is None:
        return
    least = DRIVERS[int(cuda.split(".")[0])]
    state = f"{number[0]}; CUDA {cuda} needs {least} or newer"
    if int(number[1]) >= least:
        yield Finding("driver", "OK", state)
    else:
        yield Finding("driver", "problem", state, "update NVIDIA's driver, or --device cpu")


def _triton(checked: Checked) -> Iterator[Finding]:
    """Check the compilers of Triton's kernels: a C compiler for its launchers, and ptxas."""
    if checked.device != "cuda":
        yield Finding("Triton", "OK", "not needed without a CUDA device")
        return
    if find_spec("triton") is None:
        remedy = f"{install('cuda')}, or --kernels torch --attention torch"
        yield Finding("Triton", "problem", "not installed", remedy)
        return
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        remedy = "install gcc, or set CC to a C compiler"
        yield Finding("Triton", "problem", "there is no C compiler for its launchers", remedy)
        return
    yield Finding("Triton", "OK", f"{version('triton')}, C compiler {compiler}")


def _dtype(checked: Checked) -> Iterator[Finding]:
    """Say in which format a bfloat16 checkpoint is computed."""
    if checked.device == "cuda":
        return
    native = [name for name in ("bfloat16", "float16") if computes_natively(name)]
    known = torch.cpu.get_capabilities()
    features = [name for name in _FEATURES if known.get(name)]
    state = f"instructions for {', '.join(['float32', *native])} ({', '.join(features) or 'none'})"
    result = "a model in bfloat16 is computed in float32"
    if "bfloat16" in native:
        result = "a model in bfloat16 is computed in it"
        used = [next(filter(known.get, names), "others") for names in _USED]
        state += "; those used in bfloat16 are {} in products, {} in attention".format(*used)
    yield Finding("CPU", "OK", f"{state}: with --dtype auto {result}")


# Features that oneDNN's products, and attention in C, can use; the best first.
_USED = ("amx_bf16", "avx512_bf16"), ("avx512_bf16", "avx512_f", "avx2")
_FEATURES = [
    "avx2",
    "avx512_f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
]


def _compiler(checked: Checked) -> Iterator[Finding]:
    if checked.device == "cuda" or checked.model.backend == "jax":
        return
    if find_prebuilt(torch.float32) is not None:
        yield Finding("C compiler", "OK", "not needed: the functions in C are already compiled")
    elif shutil.which(cc()) is not None:
        yield Finding("C compiler", "OK", cc())
    else:
        remedy = "install gcc; without it, models are slower on a CPU"
        yield Finding("C compiler", "warning", f"there is no {cc()} for functions in C", remedy)


def _memory(checked: Checked) -> Iterator[Finding]:
    if checked.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        state = f"{mebibytes(free)} of {mebibytes(total)} free on the device"
    else:
        free = HostMemory().free()
        state = f"{mebibytes(free)} free for this process"
    if free >= LEAST_MEMORY:
        yield Finding("memory", "OK", state)
    else:
        remedy = "end other programs, or raise the container's limit; `gpuscore info MODEL` says "
        yield Finding("memory", "warning", state, remedy + "what a model needs")


def _caches(checked: Checked) -> Iterator[Finding]:
    """Check the folders that models and compiled code are kept in."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield _folder("models", Path(HF_HUB_CACHE), "HF_HOME", LEAST_DISK)
    if checked.device == "cuda":
        home = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        yield _folder("Triton's cache", Path(home), "TRITON_CACHE_DIR", 0)


def _folder(name: str, path: Path, variable: str, least: int) -> Finding:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = f"set {variable} to a folder that this user can write to"
        return Finding(name, "warning", f"{path} cannot be written to", remedy)
    free = shutil.disk_usage(existing).free
    state = f"{path}, {free / 2**30:,.1f} GiB free"
    if free >= least:
        return Finding(name, "OK", state)
    return Finding(name, "warning", state, f"free some space, or set {variable} to another disk")


def _address(checked: Checked) -> Iterator[Finding]:
    server = checked.server
    where = f"{server.host}, port {server.port}"
    try:
        with bind(server):
            yield Finding("address", "OK", f"{where} is free")
    except ConfigError as error:
        remedy = "choose another --port, or 0 for any free one; or end what listens there"
        yield Finding("address", "problem", str(error), remedy)
    try:
        keys = read_api_keys(server)
    except ConfigError as error:
        state, _, remedy = str(error).partition(": set ")
        yield Finding("API key", "problem", state, f"set {remedy}" if remedy else "mend the file")
    else:
        yield Finding(
            "API key", "OK", f"{len(keys)} given" if keys else "none needed for this address"
        )


_CHECKS: tuple[Callable[[Checked], Iterator[Finding]], ...] = (
    _driver,
    _triton,
    _dtype,
    _compiler,
    _memory,
    _caches,
    _address,
)
