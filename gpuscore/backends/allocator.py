"""The settings of torch's allocator for CUDA, which torch reads from the environment."""

import os
import platform
import sys

# Batches have all sizes. In blocks of fixed addresses, what is free between them would soon be too
# small for the largest batch; segments that grow have no such gaps.
SETTINGS = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's name, and its older one


def set_allocator() -> None:
    """Choose growing segments, unless the environment has settings or torch was imported before.

    torch reads the variable while it is imported, so this comes first. Segments need Linux, and not
    the one in Windows: its driver fails at their first allocation (pytorch issue 192330).
    """
    chosen = any(name in os.environ for name in VARIABLES)
    native = sys.platform == "linux" and "microsoft" not in platform.release().lower()
    if native and "torch" not in sys.modules and not chosen:
        os.environ[VARIABLES[0]] = SETTINGS
