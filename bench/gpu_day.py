"""Measure what a CUDA card can tell in nine minutes, without a network and without hands.

    make gpu-day OUT=DIR                   # by default $OUT, or the folder gpu-day
    make gpu-day ARGS='--stages "ceilings;triton"'
    make gpu-day ARGS='--device cpu'       # a trial; also the default where there is no card

PYTHON needs torch, Triton, msgspec and transformers with their dependencies; bench/README.md says
how to carry wheels of what other stages need.

Each stage is a process of its own with a time limit. After every stage `gpu-day.json` in the folder
has all findings so far, and the end of what failed stages printed. A run that is killed loses one
stage. The day ends within its minutes by its own clock; what was not
reached is named. Every result is compared with a reference before it is timed. At the end it prints
the rows. The exit code is 1 if a stage failed or was not reached.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from gpu_stages import BENCH, ROOT, Command, Found, Stage, stages
from report import machine, replace_json, table

MINUTES = 9.0
MARGIN = 10.0  # seconds kept for the end of the last stage
GRACE = 5.0  # seconds from a stage's interrupt to its end: pytest says what failed
LEAST = 5.0  # seconds without which no stage is begun
TAIL = 20_000  # characters of a stage's output that are kept in the JSON if it fails
SHOWN = ("scorer", "workload", "sizes", "ms", "items/s", "of floor", "wrong", "failed")
# Stands between the day and a command, which ends with the day: it must not use the device beside
# the next run. A function between fork and exec may hang where there are threads.
STARTER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Day:
    """The findings of all stages in one folder, rewritten after every stage."""

    def __init__(self, folder: Path, scratch: Path, about: Found) -> None:
        self.folder = folder
        self.scratch = scratch
        self.stages: dict[str, Found] = {}
        self.findings = {"about": about, "stages": self.stages}

    def run(self, planned: Sequence[Stage], minutes: float) -> None:
        """Run the stages in their order until the time is up."""
        end = time.monotonic() + 60 * minutes - MARGIN
        for stage in planned:
            left = end - time.monotonic()
            if left < LEAST:
                self._keep(stage, {"status": "not reached", "why": "the time is up"})
            else:
                limit = min(stage.limit, left)
                print(f"{stage.name}: at most {limit:.0f} s", flush=True)
                self._keep(stage, run_stage(stage, self.scratch, limit))

    def _keep(self, stage: Stage, result: Found) -> None:
        self.stages[stage.name] = result
        replace_json(self.folder / "gpu-day.json", self.findings)
        why = f": {result['why']}" if "why" in result else ""
        print(f"{stage.name}: {result['status']}{why}, {result.get('seconds', 0)} s", flush=True)

    @property
    def missing(self) -> list[str]:
        """Return the stages that did not end well."""
        return [name for name, about in self.stages.items() if about["status"] != "done"]

    def table(self) -> str:
        """Return all rows as text; one that is wrong or failed has no time."""
        found = [about.get("found", {}).get("rows", ()) for about in self.stages.values()]
        return table([row for rows in found for row in rows if "scorer" in row], SHOWN)


def run_stage(stage: Stage, scratch: Path, limit: float) -> Found:
    """Run a stage's commands; return its status, seconds and findings.

    A stage that fails keeps its findings, if they can be read.
    """
    begun = time.monotonic()
    printed = scratch / f"{stage.name.replace(' ', '-')}.txt"
    why = ""
    try:
        for command in stage.commands:
            code = run_command(command, printed, limit - (time.monotonic() - begun))
            if code:
                last = printed.read_text(errors="replace").strip().rpartition("\n")[2]
                why = f"ended with {code}: {last}"
                break
    except subprocess.TimeoutExpired:
        why = f"took more than {limit:.0f} s"
    seconds = {"seconds": round(time.monotonic() - begun, 1)}
    text = printed.read_text(errors="replace") if printed.is_file() else ""
    found: Found = {}
    try:
        found = {"found": stage.read(text)}
    except (OSError, LookupError, ValueError) as error:
        why = why or f"its findings cannot be read: {type(error).__name__} {error}"
    bad = {"why": why, "printed": text[-TAIL:]} if why else {}
    return {"status": "failed" if why else "done"} | bad | seconds | found


def run_command(command: Command, printed: Path, limit: float) -> int:
    """Run a command without a network, add what it prints to a file, and return its exit status.

    Afterwards the rest of its process group is killed.

    Raises:
        subprocess.TimeoutExpired: it took longer than `limit`; it was interrupted, then killed.
    """
    brought = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = (ROOT, ROOT / "kernels", ROOT / "tests", BENCH)
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (*paths, *brought))), "HF_HUB_OFFLINE": "1"}
    starter = (sys.executable, "-IS", "-c", STARTER, os.getpid())
    with printed.open("ab") as out:
        process = subprocess.Popen(
            [str(part) for part in (*starter, *command)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=os.environ | variables,
        )
    try:
        return process.wait(max(0.1, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv: list[str] | None = None) -> int:
    import torch  # slow to import, and the tests of the day need none

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=found)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    default = Path(os.environ.get("OUT") or ROOT / "gpu-day")
    parser.add_argument("--output", type=Path, metavar="DIR", default=default)
    parser.add_argument("--stages", metavar="A;B", help="only these")
    of_fa4 = "also measure --attention fa4, whose kernels `gpuscore_kernels.hopper` put there"
    parser.add_argument("--objects", type=Path, metavar="DIR", help=of_fa4)
    options = parser.parse_args(argv)
    about = machine() | {"device": options.device}
    if options.device == "cpu":
        about["sizes"] = "small: a trial, whose figures mean nothing"
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    if options.objects is not None:
        os.environ["TRITON_CACHE_DIR"] = str(options.objects.resolve())
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as scratch:
        planned = stages(options.device, Path(scratch), fa4=options.objects is not None)
        if options.stages:
            names = options.stages.split(";")
            planned = [stage for stage in planned if stage.name in names]
        day = Day(options.output.resolve(), Path(scratch), about)
        day.run(planned, options.minutes)
    missing = ", ".join(day.missing) or "none"
    print(f"\n{day.table()}\n\nwritten to {day.folder}; not done: {missing}")
    return int(bool(day.missing))


if __name__ == "__main__":
    sys.exit(main())
