"""The device that runs the model (`--device`)."""

import torch

from gpuscore.backends.common.nvidia import nvidia_device
from gpuscore.errors import ConfigError

# The oldest driver of each release of CUDA, from its release notes.
DRIVERS = {12: 525, 13: 580}


def choose_device(name: str) -> torch.device:
    """Return the device for a `--device`.

    "auto" is CUDA if torch can use it, else the CPU. It is refused on a machine with an NVIDIA
    device that torch cannot use, torch's CPU build included: nothing but its slowness would show
    that a model runs on the CPU.

    Raises:
        ConfigError: the device cannot be used.
    """
    if name == "tpu":
        raise ConfigError("--device tpu needs --backend jax")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise ConfigError(f"--device cuda: this torch sees no CUDA device: {_why_not()}")
    node = nvidia_device()
    if node is not None:
        raise ConfigError(
            f"--device auto: this machine has an NVIDIA device, {node}, that cannot be used: "
            f"{_why_not()}; make it usable, or choose --device cpu"
        )
    return torch.device("cpu")


def check_devices(ranks: int, device: torch.device) -> None:
    """Raise ConfigError if `--tensor-parallel` has too few devices; ranks share a CPU."""
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


def _why_not() -> str:
    """Say why torch cannot use CUDA, and what it needs."""
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    needs = f"CUDA {cuda} needs a driver of version {DRIVERS[int(cuda.split('.')[0])]} or newer"
    return f"{_error_of_cuda()}; {needs}, whose libraries the dynamic linker finds"


def _error_of_cuda() -> str:
    """Return the first sentence with which torch refuses to start CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA's runtime library
        return str(error).splitlines()[0].partition(". ")[0].removesuffix(".")
    return "torch finds no device"
