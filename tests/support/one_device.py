"""Answers of `torch.cuda` on a machine that has one device, whatever plays it."""

from collections.abc import Callable
from typing import Any


def one_device(name: str, capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Return what takes the place of the functions of `torch.cuda` that describe devices."""
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
    }
