"""The device that runs the model (`--device`)."""

import logging
import os
from pathlib import Path

import torch

from gpuscore.errors import ConfigError

logger = logging.getLogger(__name__)

# The oldest driver of each release of CUDA, from its release notes.
DRIVERS = {12: 525, 13: 580}
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all devices


def choose_device(name: str, nodes: Path = Path("/dev")) -> torch.device:
    """Return the device for a `--device`.

    "auto" is CUDA if torch can use it, else the CPU. It is refused on a machine with an NVIDIA
    device that cannot be used: nothing but its slowness would show that a model runs on the CPU.
    torch's CPU build was not meant to use a device, so there a warning has to do.

    Args:
        name: auto, cpu, cuda or tpu.
        nodes: directory of the machine's device files.

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
    node = _nvidia_device(nodes)
    if node is not None and torch.version.cuda is None:
        logger.warning(
            "--device is cpu, though there is an NVIDIA device, %s: %s", node, _why_not()
        )
    elif node is not None:
        raise ConfigError(
            f"--device auto: this machine has an NVIDIA device, {node}, that cannot be used: "
            f"{_why_not()}; make it usable, or choose --device cpu"
        )
    return torch.device("cpu")


def _nvidia_device(nodes: Path) -> Path | None:
    """Return the file of a device that is there and not hidden by CUDA_VISIBLE_DEVICES."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return None
    return next(iter(sorted(nodes.glob("nvidia[0-9]*"))), None)


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
    except RuntimeError as error:
        return str(error).splitlines()[0].partition(". ")[0].removesuffix(".")
    return "torch finds no device"
