"""Everything that a CUDA card can tell, in at most 25 minutes, without a network and without hands.

    make gpu-day                             # needs a CUDA device; continues what is in gpu-day/
    make gpu-day ARGS='--output DIR'         # another folder
    make gpu-day ARGS=--trial                # the same with small sizes; its figures mean nothing
    make gpu-day ARGS='--device cpu'         # a trial without a card

PYTHON needs torch, Triton, transformers and pytest with their dependencies, and msgspec, without
which parity fails; FlashInfer and pytest-xdist are used if they are installed. The stages are the
gate on generated code, the tests, the benches, attention backends side by side, and parity with
scores that a CPU has recorded. Each is a process of its own with a time limit; if one fails or
hangs, only its findings are lost.

The folder holds one JSON file with all findings, one page with tables, and what each stage printed.
The same command continues a run that ended early: stages that are done are kept. The exit code is 1
if a stage failed or was not reached.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from card import card
from gpu_day_page import write_page
from gpu_day_stages import Stage, run_stage, stages
from gpu_state import replace_json
from report import commit, now

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "gpu-day"
MARGIN = 20.0  # seconds kept for the page
NO_DEVICE = 78
Found = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    about = describe(options.device, options.trial)
    if about is None:
        print("make gpu-day needs a CUDA device; this torch sees none")
        return NO_DEVICE
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    day = Day.open(folder, about)
    day.run(stages(options.device, folder, trial=options.trial), options.minutes)
    page = write_page(folder, day.found)
    print(f"\nwritten to {day.path} and {page}")
    for name, why in day.missing.items():
        print(f"{name}: {why}")
    return int(bool(day.missing))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--trial", action="store_true", help="small sizes and few tests; always with --device cpu"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of this run")
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="DIR")
    options = parser.parse_args(argv)
    options.trial |= options.device == "cpu"
    return options


def describe(kind: str, trial: bool) -> Found | None:
    """Return the card and the versions of libraries; None if there is no such device."""
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        return None
    sizes = {"trial": "small sizes, whose figures mean nothing"} if trial else {}
    return {"commit": commit(), **card(torch.device(kind)), **sizes}


class Day:
    """The findings of all runs in one folder, rewritten after every stage."""

    def __init__(self, path: Path, found: Found) -> None:
        self.path, self.found = path, found
        self.stages: dict[str, Found] = found["stages"]

    @classmethod
    def open(cls, folder: Path, about: Found) -> "Day":
        """Start a day, or continue the folder's.

        Raises:
            SystemExit: the folder's findings are of another card, commit or version.
        """
        path = folder / "gpu-day.json"
        if not path.exists():
            found: Found = {"bench": "gpu-day", "date": now(), "about": about, "stages": {}}
            return cls(path, found)
        found = json.loads(path.read_text())
        if found["about"] != about:
            sys.exit(f"{path} is about {found['about']}, this is {about}; give another --output")
        return cls(path, found)

    def run(self, planned: list[Stage], minutes: float) -> None:
        """Run the stages that are not done, until the time is up."""
        end = time.monotonic() + 60 * minutes - MARGIN
        self.found["planned"] = [stage.name for stage in planned]
        for stage in planned:
            if self.stages.get(stage.name, {}).get("status") == "done":
                print(f"{stage.name}: done before", flush=True)
                continue
            left = end - time.monotonic()
            if left < stage.needs:
                why = f"{max(0.0, left):.0f} s were left, {stage.needs:.0f} are needed"
                self._keep(stage.name, {"status": "not reached", "why": why})
                continue
            print(f"{stage.name}: at most {min(stage.limit, left):.0f} s", flush=True)
            self._keep(stage.name, run_stage(stage, self.path.parent, min(stage.limit, left)))

    def _keep(self, name: str, result: Found) -> None:
        self.stages[name] = result
        replace_json(self.path, self.found)
        print(f"  {result['status']}" + (f": {result['why']}" if "why" in result else ""))

    @property
    def missing(self) -> dict[str, str]:
        """Return the stages that are not done, with the reasons."""
        return {
            name: about.get("why")
            for name, about in self.stages.items()
            if about["status"] != "done"
        }


if __name__ == "__main__":
    sys.exit(main())
