"""A command in a process group of its own, all ended with the process that waits for it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal that a process gets when its parent ends


def run_group(command: Sequence[str | Path], limit: float | None = None, **options: Any) -> int:
    """Run a command to its end, kill the rest of its process group, and return its exit status.

    If this process is killed meanwhile, so is the command: it must not use the device beside the
    run that continues this one.

    Args:
        command: program and arguments.
        limit: seconds.
        options: for `subprocess.Popen`.

    Raises:
        subprocess.TimeoutExpired: it took longer than `limit`.
    """
    # This file as a program stands between, because a function that runs between fork and exec may
    # hang where there are threads (`preexec_fn` of subprocess).
    starter = [sys.executable, "-IS", __file__, os.getpid()] if sys.platform == "linux" else []
    process = subprocess.Popen(
        [str(part) for part in (*starter, *command)], start_new_session=True, **options
    )
    try:
        return process.wait(limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_with(parent: int) -> None:
    """Let this process be killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
