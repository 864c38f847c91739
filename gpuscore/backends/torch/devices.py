"""The device that runs the model (`--device`), its precision and its memory."""

from collections.abc import Callable

import torch

from gpuscore.backends.common.memory import HostMemory, Memory
from gpuscore.backends.common.plan import nvidia_device
from gpuscore.errors import ConfigError
from gpuscore_kernels.launch import ARCHES

UNCHECKED = 10  # major compute capability of B200 and B300
# The oldest driver of each release of CUDA, from its release notes.
DRIVERS = {12: 525, 13: 580}
# Features of an x86 CPU, as torch names them, that multiply matrices of a dtype.
_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16"),
    "float16": ("avx512_fp16", "amx_fp16"),
}


def choose_device(name: str) -> torch.device:
    """Return the device that `--device` names.

    "auto" is CUDA if torch can use it, else the CPU. If the machine has an NVIDIA device that torch
    cannot use, "auto" is an error: otherwise the model would run slowly on the CPU, and nothing
    would say so. The CPU build of torch is such a case.

    Raises:
        ConfigError: the device cannot be used.
    """
    if name == "tpu":
        raise ConfigError("--device tpu needs --backend jax")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major == UNCHECKED:
            raise ConfigError(
                f"--device {name}: {torch.cuda.get_device_name()} is sm_{major}{minor}, for which "
                f"no kernel was compiled or checked; supported: "
                f"{', '.join(f'sm_{arch}' for arch in ARCHES)}"
            )
        return torch.device("cuda")
    if name == "cuda":
        raise ConfigError(f"--device cuda: this torch sees no CUDA device: {_why_no_cuda()}")
    node = nvidia_device()
    if node is not None:
        raise ConfigError(
            f"--device auto: this machine has an NVIDIA device, {node}, that cannot be used: "
            f"{_why_no_cuda()}; make it usable, or choose --device cpu"
        )
    return torch.device("cpu")


def check_devices(ranks: int, device: torch.device) -> None:
    """Raise ConfigError if `--tensor-parallel` has too few GPUs. Ranks may share a CPU."""
    if device.type == "cpu" or ranks == 1:
        return
    if count_cuda() < ranks:
        raise ConfigError(
            f"--tensor-parallel {ranks} needs a CUDA device for each rank; torch sees "
            f"{count_cuda()}"
        )


def count_cuda() -> int:
    """Return the number of CUDA devices that torch sees; CUDA_VISIBLE_DEVICES hides the others."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _why_no_cuda() -> str:
    """Say why torch cannot use CUDA, and what it needs."""
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    needs = f"CUDA {cuda} needs a driver of version {DRIVERS[int(cuda.split('.')[0])]} or newer"
    return f"{_cuda_error()}; {needs}, with its libraries where the dynamic linker finds them"


def _cuda_error() -> str:
    """Return the first sentence of torch's error when it starts CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA's runtime library
        return str(error).splitlines()[0].partition(". ")[0].removesuffix(".")
    return "torch finds no device"


def computes_natively(dtype: str) -> bool:
    """Return True if this CPU has instructions for matrix products in `dtype`.

    oneDNN also emulates formats: bfloat16 on any x86 CPU with AVX-512, which takes over twice the
    time of float32.
    """
    features = torch.cpu.get_capabilities()
    if features.get("architecture") == "x86_64" and dtype in _INSTRUCTIONS:
        return any(features[name] for name in _INSTRUCTIONS[dtype])
    if dtype == "bfloat16":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == "float16":
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def sum_in_float32() -> None:
    """Let cuBLAS add partial sums in float32 only, never in bfloat16 or float16.

    By default torch allows the latter when a matrix product is split along K (split-K), which
    happens with few rows. The setting holds for the whole process. TF32 is off by default.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


def memory_of(device: torch.device, ranks: int = 1) -> Memory:
    """Return the memory of a rank. Each rank has its own GPU; on a CPU they share the memory."""
    if device.type == "cuda":
        return DeviceMemory(device)
    return HostMemory(parts=ranks)


class DeviceMemory:
    """A CUDA device's memory, which other processes may share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def growth(self, *parts: Callable[[], object]) -> int | None:
        """Return the sum of the parts' peaks, see `peak`."""
        return sum(map(self.peak, parts))

    def peak(self, run: Callable[[], object]) -> int:
        """Return the bytes that `run` takes, in torch's allocator and outside of it.

        Blocks that the allocator caches count as taken. Memory outside of it holds libraries'
        code and workspaces; what other processes take meanwhile counts, too.
        """
        self.trim()
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        outside = bytes_outside_allocator(self._device, run)
        return torch.cuda.max_memory_reserved(self._device) - reserved + outside

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def bytes_outside_allocator(device: torch.device, run: Callable[[], object]) -> int:
    """Return the bytes that `run` takes outside of torch's allocator, for example for graphs."""

    def used() -> int:
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))

    before = used()
    run()
    return max(0, used() - before)
