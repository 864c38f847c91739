"""Measure what a CUDA card can tell in nine minutes, without a network and without hands.

    make gpu-day OUT=DIR                   # by default $OUT, or the folder gpu-day
    make gpu-day ARGS='--stages "ceilings;workloads"'
    make gpu-day ARGS='--device cpu'       # a trial; also the default where there is no card

PYTHON needs torch, Triton, msgspec and transformers with their dependencies. A stage whose packages
are not there fails and names them; bench/README.md says how to carry wheels.

Each stage is a process of its own with a time limit. After every stage the folder has two files:
`gpu-day.json` with all findings so far, and `gpu-day.tgz` with what the stages wrote and printed. A
run that is killed loses one stage. The day ends within its minutes by its own clock; what was not
reached is named. Every result is compared with a reference before it is timed. At the end it prints
the rows. The exit code is 1 if a stage failed or was not
reached.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from card import card
from gpu_stages import BENCH, ROOT, Found, Stage, stages
from group import run_group
from in_time import ENDS
from report import Row, commit, now, replace_json, short, table

MINUTES = 9.0
MARGIN = 10.0  # seconds kept for the last files
LEAST = 5.0  # seconds without which no stage is begun
TAIL = 3000  # characters of a stage's output that are kept in the JSON if it fails
KEPT = 4 << 20  # bytes of one file at most in the .tgz
SHOWN = (
    *("scorer", "workload", "sizes", "device ms", "wall ms", "ms", "items/s", "of floor"),
    "failed",
)


class Day:
    """The findings of all stages in one folder, rewritten after every stage."""

    def __init__(self, folder: Path, work: Path, about: Found) -> None:
        self.folder, self.work = folder, work
        self.stages: dict[str, Found] = {}
        self.findings = {"date": now(), "about": about, "stages": self.stages}

    def run(self, planned: Sequence[Stage], minutes: float) -> None:
        """Run the stages in their order until the time is up."""
        end = time.monotonic() + 60 * minutes - MARGIN
        for stage in planned:
            left = end - time.monotonic()
            if stage.lacks:
                why = f"not installed: {', '.join(stage.lacks)}; carry wheels (bench/README.md)"
                self._keep(stage, {"status": "failed", "why": why})
            elif left < LEAST:
                self._keep(stage, {"status": "not reached", "why": "the time is up"})
            else:
                limit = min(stage.limit, left)
                print(f"{stage.name}: at most {limit:.0f} s", flush=True)
                self._keep(stage, run_stage(stage, self.work, limit))

    def _keep(self, stage: Stage, result: Found) -> None:
        self.stages[stage.name] = result
        replace_json(self.folder / "gpu-day.json", self.findings)
        pack(self.work, self.folder / "gpu-day.tgz")
        why = f": {result['why']}" if "why" in result else ""
        print(f"{stage.name}: {result['status']}{why}, {result.get('seconds', 0)} s", flush=True)

    @property
    def missing(self) -> list[str]:
        """Return the stages that did not end well."""
        return [name for name, about in self.stages.items() if about["status"] != "done"]

    def table(self) -> str:
        """Return all rows as text."""
        found = [about.get("found", {}) for about in self.stages.values()]
        rows = [_marked(row) for each in found for row in each.get("rows", ())]
        return table([{name: short(row.get(name)) for name in SHOWN} for row in rows] or [{}])


def _marked(row: Row) -> Row:
    """Return a row that says in its last column why it has no time."""
    bad = [row["failed"]] if row.get("failed") else []
    bad += [f"WRONG, not timed: {row.get('errors')}"] if row.get("wrong") else []
    return row | {"failed": "; ".join(bad)}


def run_stage(stage: Stage, work: Path, limit: float) -> Found:
    """Run a stage's commands; return its status, seconds and findings.

    A stage that fails keeps its findings, if they can be read.
    """
    begun, printed = time.monotonic(), work / f"{stage.name.replace(' ', '-')}.txt"
    why = ""
    try:
        for command in stage.commands:
            code = run_command(command, printed, limit - (time.monotonic() - begun))
            if code:
                why = f"ended with {code}"
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


def run_command(command: Sequence[str | Path], printed: Path, limit: float) -> int:
    """Run a command without a network, add what it prints to a file, and return its exit status."""
    limit = max(0.1, limit)
    brought = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    told = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", BENCH, *brought))),
        "HF_HUB_OFFLINE": "1",
        ENDS: str(time.time() + limit),
    }
    with printed.open("ab") as out:
        return run_group(
            command,
            limit,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=os.environ | told,
        )


def pack(work: Path, path: Path) -> None:
    """Write the last `KEPT` bytes of all files but models into a .tgz, atomically."""
    fresh = path.with_suffix(".part")
    with tarfile.open(fresh, "w:gz") as archive:
        for file in sorted(file for file in work.rglob("*") if file.is_file()):
            name = file.relative_to(work)
            if name.parts[0] == "weights":
                continue
            about = archive.gettarinfo(file, str(name))
            with file.open("rb") as content:
                if about.size > KEPT:
                    about.name += f".last-{KEPT}-bytes"
                    content.seek(about.size - KEPT)
                    about.size = KEPT
                archive.addfile(about, content)
    os.replace(fresh, path)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if it is there")
    parser.add_argument(
        "--trial", action="store_true", help="small sizes and few tests; always on a CPU"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    default = Path(os.environ.get("OUT") or ROOT / "gpu-day")
    parser.add_argument("--output", type=Path, metavar="DIR", default=default)
    parser.add_argument("--stages", metavar="A;B", help="only these")
    parser.add_argument(
        "--objects",
        type=Path,
        metavar="DIR",
        help="also measure --attention fa4, whose kernels `gpuscore_kernels.hopper` put there",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    import torch

    options = arguments(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trial = options.trial or device == "cpu"
    about = {"commit": commit(), **card(device)}
    if trial:
        about["sizes"] = "small: a trial, whose figures mean nothing"
    print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    if options.objects is not None:
        os.environ["TRITON_CACHE_DIR"] = str(options.objects.resolve())
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as work:
        planned = stages(device, Path(work), trial=trial, fa4=options.objects is not None)
        if options.stages:
            names = options.stages.split(";")
            planned = [stage for stage in planned if stage.name in names]
        day = Day(options.output.resolve(), Path(work), about)
        day.run(planned, options.minutes)
    print(
        f"\n{day.table()}\n\nwritten to {day.folder}; not done: {', '.join(day.missing) or 'none'}"
    )
    return int(bool(day.missing))


if __name__ == "__main__":
    sys.exit(main())
