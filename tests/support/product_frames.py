"""Places in the product's source: the innermost frames of it, below which a test's device is."""

import sys
from functools import cache
from pathlib import Path
from types import FrameType

PRODUCT = ("gpuscore", "gpuscore_kernels")


def product_line() -> str:
    """Return the folder, file and line of the product's innermost frame."""
    frame = _product_frame()
    if frame is None:
        return "outside of the product"
    return _line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _line(file: str, number: int) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.name}:{number}"


def _product_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] not in PRODUCT:
        frame = frame.f_back
    return frame
