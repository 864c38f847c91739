"""Measure what a CUDA card can tell, without a network and without hands.

    make bench-gpu                           # times only; under 8 minutes, no network
    make bench-gpu SERVE=1                   # also over HTTP; needs the server's dependencies
    make bench-gpu ARGS='--sections "ceil;ref;gpuscore"'   # sections whose names begin so
    make bench-gpu ARGS=--trial              # small sizes, whose figures mean nothing
    make gpu-day                             # all; continues what is in gpu-day/
    make gpu-day ARGS='--output DIR'         # another folder
    make gpu-day ARGS='--device cpu'         # a trial without a card
    make gpu-day ARGS='--commit NAME'        # in a copy of the files without git

PYTHON needs torch, Triton and transformers with their dependencies. Stages that need more (pytest,
msgspec, the server's packages, FlashInfer) are skipped by name where it is not installed; it may
also be brought along on PYTHONPATH.

The bench times the goals' workloads against ceilings measured in the same run. Every result is
first compared with the reference. The day has these sections, the bench over HTTP, attention
backends side by side, parity with scores that a CPU has recorded, and the tests. Each stage is a
process of its own with a time limit, which it is told; one that fails or hangs keeps what it has
found, and the others run.

The day's folder holds one JSON file with all findings and one page with tables, both written after
every stage, and the output of each stage. The same command continues a run that ended early: stages
that are done or failed are kept. If a stage was killed with the run, its findings are kept, too,
and the stage runs again after all others. The exit code is 1 if a stage failed or was
not reached; a row that is wrong fails its section.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from card import card
from gpu_day_stages import Stage, found_by, in_time, run_stage, sections, stages
from report import RESULTS, Row, commit, now, read_json, replace_json, short, table

from gpuscore.measure import reports

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "gpu-day"
DAY = "gpu-day.json"
MARGIN = 20.0  # seconds kept for the page
NO_DEVICE = 78
BENCH = (
    *("scorer", "workload", "sizes", "device ms", "wall ms", "items/s", "of floor", "goal", "met"),
    "failed",
)
FLOORS = ("floor of", "sizes", "tokens", "TFLOP", "ms", "at shapes ms", "linear TFLOP/s", "items/s")
ATTENTION = ("workload", "cached", "way", "ms", "TFLOP/s", "relative error")
Found = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    about = describe(options)
    if about is None:
        print("make gpu-day and make bench-gpu need a CUDA device; this torch sees none")
        return NO_DEVICE
    if about["commit"] == "unknown" and not options.trial:
        print("git knows no commit here; name it, as in --commit 1a2b3c4")
        return 2
    day = bench(options, about) if options.bench else whole_day(options, about)
    print("\n".join(f"\n{table(rows)}" for rows in tables(day.findings) if rows))
    for name, why in day.missing.items():
        print(f"{name}: {why}")
    return int(bool(day.missing))


def bench(options: argparse.Namespace, about: Found) -> "Day":
    """Run the bench's sections; the findings of a trial are kept in --output only."""
    with tempfile.TemporaryDirectory(prefix="gpuscore-bench-") as work:
        folder = options.output or (Path(work) if options.trial else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        day = Day.open(folder.resolve() / f"gpu-{now().replace(':', '')}.json", about)
        planned = sections(
            options.device,
            Path(work),
            trial=options.trial,
            serve=options.serve,
            shape=options.shape,
        )
        chosen = tuple(f"bench: {name}" for name in options.sections.split(";"))
        planned = in_time(
            [stage for stage in planned if stage.name.startswith(chosen)], options.trial
        )
        day.run(planned, Path(work), options.minutes or (30.0 if options.trial else 7.8))
    return day


def whole_day(options: argparse.Namespace, about: Found) -> "Day":
    folder: Path = (options.output or FOLDER).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    day = Day.open(folder / DAY, about)
    planned = stages(options.device, folder, trial=options.trial)
    day.run(planned, folder, options.minutes or 25.0)
    print(f"\nwritten to {day.path} and {write_page(folder, day.findings)}")
    return day


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", action="store_true", help="the bench's sections only")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--trial", action="store_true", help="small sizes and few tests; always with --device cpu"
    )
    parser.add_argument("--minutes", type=float, help="time limit; default: 25, of the bench 7.8")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--serve", action="store_true", help="bench: also over HTTP")
    parser.add_argument("--shape", help="bench: qwen3-0.6b, small or tiny")
    parser.add_argument("--commit", metavar="NAME", help="the commit, where git cannot tell it")
    parser.add_argument("--sections", default="", metavar="A;B", help="bench: names begin so")
    options = parser.parse_args(argv)
    options.trial |= options.device == "cpu"
    return options


def describe(options: argparse.Namespace) -> Found | None:
    """Return commit, card and the versions of libraries; None if there is no such device."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return None
    sizes = {"trial": "small sizes, whose figures mean nothing"} if options.trial else {}
    told = f"{options.commit} (as told)" if options.commit else "unknown"
    described = commit() if commit() != "unknown" else told
    return {"commit": described, **card(torch.device(options.device)), **sizes}


class Day:
    """The findings of all runs in one file, rewritten after every stage."""

    def __init__(self, path: Path, findings: Found) -> None:
        self.path, self.findings = path, findings
        self.stages: dict[str, Found] = findings["stages"]

    @classmethod
    def open(cls, path: Path, about: Found) -> "Day":
        """Start a day, or continue the file's.

        Raises:
            SystemExit: the file's findings are of another card, commit or version.
        """
        if not path.exists():
            return cls(path, {"bench": path.stem, "date": now(), "about": about, "stages": {}})
        findings = read_json(path)
        if findings["about"] != about:
            sys.exit(f"{path} is about {findings['about']}, this is {about}; give another --output")
        return cls(path, findings)

    def run(self, planned: list[Stage], folder: Path, minutes: float) -> None:
        """Run the stages that have not ended, until the time is up; they write to the folder.

        Stages in which an earlier run was killed come last: they may end this run, too.
        """
        end = time.monotonic() + 60 * minutes - MARGIN
        self.findings["planned"] = [stage.name for stage in planned]
        for stage in planned:
            if self._status(stage) == "begun":
                self._keep(stage, found_by(stage, folder, "cut off", "the run was killed"))
        for stage in sorted(planned, key=lambda stage: self._status(stage) == "cut off"):
            if (status := self._status(stage)) in ("done", "failed"):
                print(f"{stage.name}: {status} before", flush=True)
            else:
                self._run(stage, folder, end - time.monotonic())

    def _run(self, stage: Stage, folder: Path, left: float) -> None:
        """Run a stage if its packages are there and the time is enough."""
        if stage.lacks:
            why = f"not there: {', '.join(stage.lacks)}"
            self._keep(stage, {"status": "skipped", "why": why})
            return
        before = self.stages.get(stage.name, {})
        if left < stage.needs:
            if before.get("status") != "cut off":
                why = f"{max(0.0, left):.0f} s were left, {stage.needs:.0f} are needed"
                self._keep(stage, {"status": "not reached", "why": why})
            return
        limit = min(stage.limit, left)
        print(f"{stage.name}: at most {limit:.0f} s", flush=True)
        earlier = {"cut off": before} if before.get("status") == "cut off" else {}
        self._keep(stage, {"status": "begun", **earlier})
        result = run_stage(stage, folder, limit)
        if result["status"] == "failed" and limit < stage.limit and result["seconds"] >= limit:
            result["status"] = "cut off"  # by the end of the run
        self._keep(stage, result | earlier)

    def _status(self, stage: Stage) -> str:
        return str(self.stages.get(stage.name, {}).get("status"))

    def _keep(self, stage: Stage, result: Found) -> None:
        self.stages[stage.name] = result
        replace_json(self.path, self.findings)
        if self.path.name == DAY:  # the bench alone has no page
            write_page(self.path.parent, self.findings)
        if result["status"] != "begun":
            why = f": {result['why']}" if "why" in result else ""
            print(f"{stage.name}: {result['status']}{why}", flush=True)

    @property
    def missing(self) -> dict[str, str]:
        """Return the stages that should have ended well and have not, with the reasons."""
        return {
            name: about.get("why", "")
            for name, about in self.stages.items()
            if about["status"] not in ("done", "skipped")
        }


def tables(findings: Found) -> Iterator[list[Row]]:
    """Yield tables as text: the floors, the rows of the bench's sections, attention's rows."""
    stages = {name: about.get("found", {}) for name, about in findings["stages"].items()}
    floors = stages.get("bench: ceilings", {}).get("floors", {})
    yield _cells([{"floor of": name} | floor for name, floor in floors.items()], FLOORS)
    named = [about.get("rows", ()) for name, about in stages.items() if name.startswith("bench: ")]
    yield _cells([_marked(row) for rows in named for row in rows], BENCH)
    yield _cells(stages.get("attention", {}).get("rows", ()), ATTENTION)


def _marked(row: Row) -> Row:
    """Return a row that says in its last column why it has no time."""
    bad = [f"{key}: {row[key]}" for key in ("failed", "unavailable") if row.get(key)]
    bad += [f"WRONG, not timed: {row.get('errors')}"] if row.get("wrong") else []
    return row | {"failed": "; ".join(bad)}


def _cells(rows: Iterable[Row], names: Iterable[str]) -> list[Row]:
    return [{name: short(row.get(name)) for name in names} for row in rows]


def write_page(folder: Path, findings: Found) -> Path:
    """Write gpu-day.html into the folder and return its path."""
    path = folder / "gpu-day.html"
    done = {name: about["found"] for name, about in findings["stages"].items() if "found" in about}
    fastest = done.get("attention", {}).get("fastest", {})
    compared = [
        f"<h3>{escape(name)}</h3><pre>{escape(chr(10).join(about['compared']))}</pre>"
        for name, about in done.items()
        if "compared" in about
    ]
    titles = ("Floors", "Bench", "Attention of one layer")
    measured = [
        part
        for title, rows in zip(titles, tables(findings), strict=True)
        for part in (f"<h2>{title}</h2>", _html(rows))
    ]
    facts = [("date", findings["date"]), *findings["about"].items()]
    parts = [
        reports.table(("", ""), [(name, escape(str(value))) for name, value in facts]),
        "<h2>Stages</h2>",
        reports.table(("stage", "status", "seconds", ""), list(_statuses(findings))),
        *measured,
        reports.table(("workload", "our fastest"), list(fastest.items())),
        "<h2>Parity</h2>",
        *compared,
    ]
    reports.write_html(path, "gpu-day", parts)
    return path


def _statuses(findings: Found) -> Iterator[tuple[str, ...]]:
    for name in findings["planned"]:
        about = findings["stages"].get(name, {"status": "not reached"})
        status = about["status"]
        shown = status if status == "done" else f'<span class="failed">{escape(status)}</span>'
        seconds, why = str(about.get("seconds", "")), escape(str(about.get("why", "")))
        yield escape(name), shown, seconds, f'<span class="text">{why}</span>'


def _html(rows: list[Row]) -> str:
    if not rows:
        return "<p>Not measured.</p>"
    return reports.table(list(rows[0]), [[*map(escape, row.values())] for row in rows])


if __name__ == "__main__":
    sys.exit(main())
