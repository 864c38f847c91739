"""The stages of bench/gpu_day.py: commands, time limits, and readers of the commands' output."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from group import run_group
from in_time import ENDS, OUTCOMES, outcomes
from report import read_json

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
# Recorded on a CPU, float32, by `make golden`.
GOLDEN = ROOT / "tests" / "fixtures" / "golden"
REAL = ROOT / ".cache" / "smollm2"  # made by `make real-model`, which needs a network
TESTS = (
    "tests/kernels/triton_interpreter",
    "tests/backends/test_gpu_attention.py",
    "tests/backends/test_contract.py",
)
ALONE = "tests/backends/test_gpu_runner.py"  # one of them takes all of the card's memory
# Of the tests, in a trial: some of the device that end soon.
TRIED = {
    "cpu": ("tests/kernels/test_tiles.py", "-m", "not hostile"),
    "cuda": (
        "tests/backends/test_contract.py",
        "-m",
        "gpu and not hostile and not slow",
        "-k",
        "not qwen3_moe",  # whose isolation comes from the tiles of kernels
    ),
}
# On a card, a trial takes minutes with the default's many sizes of graphs and its large batches.
SMALL_BATCHES = ("--cuda-graph-tokens=64", "--max-batch-tokens=512", "--kv-cache-size=64MiB")
# Sections of the bench, and seconds (limit, needs) of those that take long. The first variant
# compiles all kernels and captures all graphs.
SECTIONS = (
    *("ceilings", "reference", "gpuscore", "transformers", "profile", "graphs off"),
    *("--kernels torch", "--attention triton", "--attention torch"),
    *("--attention flashinfer", "--quantization fp8"),
    *("--quantization int8", "--deterministic"),
)
LIMITS = {"reference": (150.0, 30.0), "gpuscore": (330.0, 60.0)}
MEASURED = 5  # of them come before everything else, except HTTP, in the day of a card
SERVER = ("fastapi", "uvicorn", "msgspec", "httpx", "tokenizers")
MINUTES_LEFT = "{minutes left}"  # as a word of a command
TAIL = 2000  # characters of a failed stage's output that are kept with its findings
Found = dict[str, Any]
Command = Sequence[str | Path]


@dataclass(frozen=True)
class Stage:
    """One part of the day.

    Args:
        name: of the stage, and of the file with its output.
        commands: run one after another; the stage fails with the first that fails.
        read: returns the findings, from what the commands printed and wrote.
        limit: seconds after which the stage counts as hung.
        needs: seconds without which it is not begun.
        clears: file or folder of an earlier attempt, to which its commands would add.
        packages: without them it is skipped.
        model: without this directory it is skipped, too.
    """

    name: str
    commands: tuple[Command, ...]
    read: Callable[[str], Found]
    limit: float
    needs: float = 20.0
    clears: Path | None = None
    packages: tuple[str, ...] = ()
    model: Path | None = None

    @property
    def lacks(self) -> list[str]:
        """Return the packages that this Python does not have, and the model if it is not there."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        model = self.model is not None and not (self.model / "config.json").is_file()
        return absent + [str(self.model)] * model


def stages(device: str, folder: Path, *, trial: bool) -> list[Stage]:
    """Return all stages of the day, the most important first: measurements that need a card.

    Every bench compares results with the reference before it times them. The tests that need a
    card for themselves are a stage on a card only.

    Args:
        device: cuda or cpu.
        folder: gets the stages' files.
        trial: with small sizes.
    """
    bench, rows = (sys.executable, "-P", BENCH / "attention.py"), folder / "attention.jsonl"
    own = ("--output", rows, "--device", device, *(("--trial",) if trial else ()))
    *benches, http = sections(device, folder, trial=trial, serve=True)
    planned = [
        *benches[:MEASURED],
        http,
        Stage(
            "attention",
            ((*bench, *own), (*bench, "--cached", *own)),
            lambda _: with_fastest(json_lines(rows)),
            limit=240,
            clears=rows,
        ),
        *parity(device, folder, trial),
        *tests(device, folder, trial),
        *benches[MEASURED:],
    ]
    return in_time(planned, trial)


def sections(
    device: str, folder: Path, *, trial: bool, serve: bool = False, shape: str | None = None
) -> list[Stage]:
    """Return the sections of `make bench-gpu`, each a process; a failed section keeps its findings.

    Args:
        device, folder, trial: as for `stages`.
        serve: also over HTTP.
        shape: the model's sizes: by default Qwen3-0.6B's, in a trial tiny ones.
    """
    scratch = folder / "weights" if trial else ROOT / "scratch"
    own = ["--device", device, "--scratch", scratch, *(("--trial",) if trial else ())]
    own += ["--shape", shape or ("tiny" if trial else "qwen3-0.6b")]

    def section(name: str) -> Stage:
        command = (sys.executable, "-P", BENCH / "gpu_sections.py", *own, "--", folder, name)
        path = found_of(folder, name)
        limit, needs = LIMITS.get(name, (120.0, 30.0))
        packages = ("flashinfer",) if "flashinfer" in name and device == "cuda" else ()
        return Stage(
            f"bench: {name}", (command,), lambda _: read_json(path), limit, needs, path, packages
        )

    return [
        *map(section, SECTIONS),
        *([_over_http(device, folder, scratch, own[-1], trial)] if serve else []),
    ]


def _over_http(device: str, folder: Path, scratch: Path, shape: str | Path, trial: bool) -> Stage:
    """Return the stage that times a server of its own with `gpuscore bench`."""
    path, dtype = folder / "http.json", "bfloat16" if device == "cuda" else "float32"
    command = (
        *(sys.executable, "-P", "-m", "gpuscore", "bench", "--allow-dirty", "--output", path),
        *("--model", scratch / f"{shape}-{dtype}", "--serve", f"--device {device}"),
        *("--scenario", "latency,poisson,rerank-static", "--find-rate", "500"),
        *("--minutes", MINUTES_LEFT, *(("--scale", "0.02") if trial else ())),
    )

    def read(printed: str) -> Found:
        # The bundle is written at the end; until then there is what was printed.
        return {"bundle": read_json(path)} if path.is_file() else {"printed": printed}

    # The sections that make the model may have failed.
    make = f"make_model({str(shape)!r}, {dtype!r}, Path({str(scratch)!r}))"
    module = "from gpuscore.measure.bench.random_models import make_model"
    model = (sys.executable, "-P", "-c", f"from pathlib import Path; {module}; {make}")
    return Stage("bench: HTTP", (model, command), read, 240, 60, path, SERVER)


def in_time(planned: Sequence[Stage], trial: bool) -> list[Stage]:
    """Return the stages; a trial computes on a CPU, which may have other work, and gets longer."""
    return [replace(stage, limit=10 * stage.limit) for stage in planned] if trial else [*planned]


def tests(device: str, folder: Path, trial: bool) -> list[Stage]:
    """Return the stages that run tests; on a card, the second runs one test at a time."""

    def stage(name: str, limit: float, *chosen: str) -> Stage:
        report = folder / f"{slug(name)}.jsonl"
        pytest = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")
        command = ("env", f"{OUTCOMES}={report}", *pytest, "-p", "in_time", *chosen)
        return Stage(
            name, (command,), lambda _: outcomes(report), limit, clears=report, packages=("pytest",)
        )

    if trial:
        planned = [stage("tests", 420, *TRIED[device])]
        test = f"{ALONE}::test_graphs_score_as_launches[qwen3]"
    else:
        chosen = (*TESTS, "-m", "not hostile", "-k", "not jax")
        planned, test = [stage("tests", 420, *workers(), *chosen)], ALONE
    alone = stage("tests alone", 180, test, "-m", "not hostile")
    return [*planned, alone] if device == "cuda" else planned


def workers() -> tuple[str, ...]:
    """Return the options for pytest-xdist, if it is there: compiling kernels takes many cores."""
    has_xdist = importlib.util.find_spec("xdist") is not None
    return ("--numprocesses", "auto", "--maxprocesses", "12") if has_xdist else ()


def parity(device: str, folder: Path, trial: bool) -> list[Stage]:
    """Return the stages that compare scores: with a CPU's, and with transformers on this device.

    The CPU's were recorded in float32, in which scores differ by rounding only. In bfloat16 an
    error is compared with transformers' error, computed here. A failed gate fails the stage.
    """
    gpuscore = (sys.executable, "-P", "-m", "gpuscore", "parity")
    small = SMALL_BATCHES if trial and device == "cuda" else ()
    demo = ("demo", "--workload", "quick", "--device", device, *small)
    real = (REAL, "--workload", "text", "--device", device, *small)

    def compared(printed: str) -> Found:
        return {"compared": printed[printed.rfind("scores ") :].splitlines()}

    def recorded(name: str, asked: Command, reference: str, **more: Any) -> Stage:
        bundle = folder / name.replace(" ", "-")
        return Stage(
            name,
            ((*gpuscore, "record", *asked, "--dtype", "float32", "--output", bundle),
             (*gpuscore, "compare", GOLDEN / reference, bundle)),
            compared,
            limit=180,
            clears=bundle,
            packages=("msgspec",),
            **more,
        )  # fmt: skip

    return [
        recorded("parity with a CPU", demo, "torch-float32"),
        recorded("parity of SmolLM2 with transformers", real, "smollm2-float32", model=REAL),
        Stage(
            "parity with transformers",
            ((*gpuscore, "run", *demo, "--backends", "torch:bfloat16", "--report",
              folder / "parity.html"),),
            compared,
            limit=180,
            packages=("msgspec",),
        ),
    ]  # fmt: skip


def run_stage(stage: Stage, folder: Path, limit: float) -> Found:
    """Run a stage's commands; return its status, seconds and findings.

    A stage that fails keeps its findings, if they can be read.
    """
    begun, printed = time.monotonic(), printed_of(stage, folder)
    printed.write_text("")
    if stage.clears is not None:
        clear(stage.clears)
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
    return found_by(stage, folder, "failed" if why else "done", why) | seconds


def found_by(stage: Stage, folder: Path, status: str, why: str) -> Found:
    """Return the findings that a stage has left in the folder, whether or not it has ended."""
    path, findings = printed_of(stage, folder), dict[str, Any]()
    printed = path.read_text(errors="replace") if path.is_file() else ""
    try:
        findings = {"found": stage.read(printed)}
    except (OSError, LookupError, ValueError) as error:
        status = "failed" if status == "done" else status
        why = why or f"its findings cannot be read: {type(error).__name__} {error}"
    if status == "done":
        return {"status": status, **findings}
    return {
        "status": status, "why": f"{why}, see {path.name}", **findings, "printed": printed[-TAIL:]
    }  # fmt: skip


def printed_of(stage: Stage, folder: Path) -> Path:
    """Return the file that gets what a stage prints."""
    return folder / f"{slug(stage.name)}.txt"


def slug(name: str) -> str:
    """Return a name in a form that fits a file's name."""
    return re.sub(r"[^\w.]+", "-", name)


def found_of(folder: Path, section: str) -> Path:
    """Return the file of a section's findings."""
    return folder / f"bench-{slug(section)}.json"


def clear(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_command(command: Command, printed: Path, limit: float) -> int:
    """Run a command without a network, add what it prints to a file, and return its exit status."""
    limit = max(0.0, limit)
    words = [f"{limit / 120:.2f}" if word == MINUTES_LEFT else word for word in command]
    own = (str(ROOT), str(ROOT / "kernels"), str(BENCH))
    brought = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    told = {
        "PYTHONPATH": os.pathsep.join((*own, *brought)),
        "HF_HUB_OFFLINE": "1",
        ENDS: str(time.time() + limit),
    }
    with printed.open("ab") as out:
        return run_group(
            words,
            limit,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env=os.environ | told,
        )


def json_lines(path: Path) -> list[Found]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def with_fastest(rows: Sequence[Found]) -> Found:
    return {"rows": rows, "fastest": fastest(rows)}


def fastest(rows: Sequence[Found]) -> dict[str, str]:
    """Return the fastest attention backend for each workload."""
    best: dict[str, Found] = {}
    for row in rows:
        name = row["workload"] + (", prefix cached" if row["cached"] else "")
        if name not in best or row["ms"] < best[name]["ms"]:
            best[name] = row
    return {name: row["way"] for name, row in best.items()}
