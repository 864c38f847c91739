"""Kills a batch job before each of its changes to the disk, and continues it.

    python -m support.batch_sweep FOLDER INPUT OUTPUT STEP  # every STEP-th change

Each run is a fork that ends as by SIGKILL: nothing is closed, nothing in a buffer is written.
"""

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from gpuscore.commands.bulk import inputs
from gpuscore.commands.bulk.work import JobFolder
from support.batch_jobs import run

CHANGES = ("fsync", "rename", "unlink", "rmdir", "mkdir")
KILLED = 9
inputs.BLOCK_ROWS = 10


def count_changes(at: int) -> Callable[[], int]:
    """Have this process end before its change number `at`; return a function that counts them."""
    numbers, seen = count(), [0]

    def before(change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **words: Any) -> Any:
            seen[0] = next(numbers)
            if seen[0] == at:
                os._exit(KILLED)
            return change(*arguments, **words)

        return counted

    for name in CHANGES:
        setattr(os, name, before(getattr(os, name)))
    return lambda: seen[0]


def forked(work: Callable[[], Any]) -> int:
    """Run `work` in a fork; return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (the fork ends here)
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def results(output: Path) -> dict[str, bytes]:
    """Return the content of every file that a job has left."""
    return {
        path.name: path.read_bytes() if path.is_file() else b"folder"
        for path in output.parent.iterdir()
    }


def sweep(folder: Path, input: Path, name: str, step: int) -> int:
    """Return the number of kills after which the same command gave the same files."""
    (folder / "whole").mkdir()
    whole = folder / "whole" / name
    assert forked(lambda: run(input, whole)) == 0
    expected = results(whole)
    for at in count(0, step):
        place = folder / str(at)
        place.mkdir()
        output = place / name

        def killed(output: Path = output, at: int = at) -> None:
            count_changes(at)
            run(input, output)

        ended = forked(killed)
        if ended == 0:
            return at // step
        assert ended == KILLED, f"killed before change {at}: {ended}"
        work = JobFolder(output.parent / f"{name}.work")
        finished = output.exists() and not work.settings()
        again = forked(lambda output=output: run(input, output))
        # Killed after all was done, but for the folder: there is nothing to continue.
        assert again == (1 if finished else 0), f"continued after change {at}: {again}"
        assert results(output) == expected, f"change {at}: {sorted(results(output))}"
    raise AssertionError("there is an end")


if __name__ == "__main__":
    print("kills:", sweep(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
