"""NVIDIA devices of this machine, as its files show them, whatever a framework makes of them."""

import os
from pathlib import Path

NODES = Path("/dev")
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all devices


def nvidia_device() -> Path | None:
    """Return the file of a device that is there and not hidden by CUDA_VISIBLE_DEVICES."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return None
    return next(iter(sorted(NODES.glob("nvidia[0-9]*"))), None)
