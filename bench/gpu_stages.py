"""The stages of bench/gpu_day.py, the most valuable first: commands, limits, readers."""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import read_json

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
GOLDEN = ROOT / "tests" / "fixtures" / "golden"  # recorded on a CPU, float32, by `make golden`
INTERPRETED = "tests/kernels/triton_interpreter"  # on a card they are compiled
LINEAR = f"{INTERPRETED}/test_linear_layers.py"
ATTENTION = (
    "tests/backends/test_gpu_attention.py",
    "tests/kernels/test_gated_product.py",
    f"{INTERPRETED}/test_fa4.py",
    f"{INTERPRETED}/test_extend_attention.py",
    f"{INTERPRETED}/test_attention_backends.py",
)
ALONE = "tests/backends/test_gpu_runner.py"  # one of them takes all of the card's memory
REST = (INTERPRETED, "tests/backends/test_contract.py", "-k", "not jax")
TRIAL_TESTS = ("tests/kernels/test_tiles.py",)
TAIL = 2000  # characters of a comparison
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
Found = dict[str, Any]
Command = tuple[str | Path, ...]


@dataclass(frozen=True)
class Stage:
    """One part of the day.

    Args:
        name: names the stage and the file with its output.
        limit: seconds after which the stage counts as hung.
        read: returns the findings, of what the commands have printed.
        commands: run one after another; the stage fails with the first that fails.
    """

    name: str
    limit: float
    read: Callable[[str], Found]
    commands: tuple[Command, ...]


def stages(device: str, scratch: Path, fa4: bool = False) -> list[Stage]:
    """Return all stages of the day.

    Args:
        device: cuda or cpu, on which sizes are small.
        scratch: folder that gets the stages' files.
        fa4: measure this attention, too.
    """
    on_cuda, python = device == "cuda", (sys.executable, "-P")
    gpuscore = (*python, "-m", "gpuscore")
    weights = ROOT / "scratch" if on_cuda else scratch / "weights"
    served = scratch / ("qwen3-0.6b-bfloat16" if on_cuda else "tiny-float32")

    def section(name: str, limit: float) -> Stage:
        """Measure this Python's torch."""
        command = (*python, BENCH / "gpu_sections.py", scratch, name, weights, device)
        return Stage(name, limit, lambda _: read_json(scratch / f"{name}.json"), (command,))

    def http(limit: float) -> Stage:
        """Time its own server with `gpuscore bench`."""
        bundle = scratch / "http.json"
        scale = () if on_cuda else ("--scale", "0.02")
        bench = (*gpuscore, "bench", "--output", bundle, "--model", served, *scale)
        load = ("--scenario", "latency,poisson", "--rate", "70%", "--seconds", "8")
        command = (*bench, "--serve", f"--device {device}", *load, "--minutes", "0.4")
        return Stage("http", limit, lambda _: read_json(bundle), (command,))

    def compared(name: str, limit: float, *more: str) -> Stage:
        """Compare the demo's scores with a CPU's, in float32; a failed gate fails the stage."""
        bundle = scratch / f"{name.replace(' ', '-')}.json"
        quick = ("--workload", "quick", "--device", device, "--dtype", "float32", *more)
        record = (*gpuscore, "parity", "record", "demo", *quick, "--output", bundle)
        compare = (*gpuscore, "parity", "compare", GOLDEN / "torch-float32.json", bundle)
        return Stage(name, limit, lambda printed: {"printed": printed[-TAIL:]}, (record, compare))

    def tests(name: str, limit: float, *chosen: str) -> Stage:
        """Run tests, until their time is up."""
        options = ("-v", "-p", "no:cacheprovider", "-m", "not hostile")
        return Stage(name, limit, outcomes, ((*python, "-m", "pytest", *options, *chosen),))

    planned = [
        section("ceilings", 80),
        section("triton", 100),
        *([section("fa4", 100)] if fa4 else []),
        http(80),
        section("hybrid", 80),
        compared("jax", 90, "--backend", "jax"),
        compared("parity with a CPU", 40),
    ]
    if not on_cuda:  # a CPU may have other work
        planned = [*planned, tests("tests", 300, *TRIAL_TESTS)]
        return [replace(each, limit=4 * each.limit) for each in planned]
    has_xdist = importlib.util.find_spec("xdist") is not None  # compiling takes many cores
    workers = ("--numprocesses", "auto", "--maxprocesses", "12") if has_xdist else ()
    done = [f"--ignore={path}" for path in (LINEAR, *ATTENTION)]
    return [
        *planned,
        tests("tests of attention", 60, *workers, *ATTENTION),
        tests("tests of linear layers", 60, *workers, LINEAR),
        tests("tests alone", 60, ALONE),
        tests("tests", 300, *workers, *done, *REST),
    ]


def outcomes(printed: str) -> Found:
    """Return how many tests passed, failed and so on, and the names of the failed ones.

    pytest -v prints each outcome when it is known, before the test's name if xdist runs it: a run
    that is ended loses only the test that is running.
    """
    kinds = "|".join(OUTCOMES)
    ended = re.findall(rf"^\[gw\d+\] \[[ \d]+%\] ({kinds}) (\S+::.+?) *$", printed, re.M)
    alone = re.findall(rf"^(\S+::.+?) ({kinds})\b.*\[[ \d]+%\]$", printed, re.M)
    ended += [(kind, test) for test, kind in alone]
    counts = {kind.lower(): [of for of, _ in ended].count(kind) for kind in OUTCOMES}
    bad = [test for kind, test in ended if kind in ("FAILED", "ERROR")]
    return {"tests": len(ended)} | {k: n for k, n in counts.items() if n} | {"not passed": bad}
