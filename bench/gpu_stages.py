"""The stages of bench/gpu_day.py, the most valuable first: commands, limits, readers."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from in_time import OUTCOMES, outcomes
from report import read_json

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
GOLDEN = ROOT / "tests" / "fixtures" / "golden"  # recorded on a CPU, float32, by `make golden`
SERVER = ("fastapi", "uvicorn", "httptools", "msgspec", "httpx", "tokenizers", "prometheus_client")
PYTEST = ("pytest", "msgspec", "hypothesis")
HYBRID_TESTS = ("tests/kernels/triton_interpreter", "-k", "delta")
ALONE = "tests/backends/test_gpu_runner.py"  # one of them takes all of the card's memory
TESTS = (
    "tests/backends/test_gpu_attention.py",
    "tests/kernels/test_gated_product.py",
    "tests/kernels/triton_interpreter",
    "tests/backends/test_contract.py",
)
TRIAL_TESTS = ("tests/kernels/test_tiles.py",)
Found = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One part of the day.

    Args:
        name: of the stage, and of the file with its output.
        commands: run one after another; the stage fails with the first that fails.
        read: returns the findings, of what the commands have printed.
        limit: seconds after which the stage counts as hung.
        packages: without them it fails.
    """

    name: str
    commands: tuple[tuple[str | Path, ...], ...]
    read: Callable[[str], Found]
    limit: float
    packages: tuple[str, ...] = ()

    @property
    def lacks(self) -> list[str]:
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def stages(device: str, work: Path, *, trial: bool, objects: Path | None = None) -> list[Stage]:
    """Return all stages of the day.

    Args:
        device: cuda or cpu.
        work: folder that gets the stages' files.
        trial: with small sizes.
        objects: folders of kernels that the trials' `--compile` made, if they are to be tried.
    """
    scratch = work / "weights" if trial else ROOT / "scratch"
    own = ("--device", device, "--scratch", scratch, *(("--trial",) if trial else ()))

    def section(name: str, limit: float) -> Stage:
        command = (sys.executable, "-P", BENCH / "gpu_sections.py", work, name, *own)
        return Stage(name, (command,), lambda _: read_json(work / f"{name}.json"), limit)

    tests = [_tests("tests", 300, work, *TRIAL_TESTS)]
    if not trial:
        tests = [
            _tests("tests alone", 90, work, ALONE),
            _tests("tests", 300, work, *_workers(), *TESTS, "-k", "not jax"),
        ]
    planned = [
        section("ceilings", 80),
        section("workloads", 90),
        section("under load", 45),
        section("profiles", 40),
        *([] if objects is None else _trials(work, objects)),
        section("hybrid", 90),
        *([] if trial else [_tests("hybrid tests", 60, work, *HYBRID_TESTS)]),
        section("fp8", 50),
        _parity("jax", device, work, 75, "--backend", "jax"),
        _parity("parity with a CPU", device, work, 60),
        _http(device, work, scratch, trial),
        *tests,
    ]
    # A CPU may have other work.
    return [replace(each, limit=4 * each.limit) if trial else each for each in planned]


def _trials(work: Path, objects: Path) -> Iterator[Stage]:
    """Yield a stage per folder of objects, named after its trial, such as fa4 and fa4-more."""
    for folder in sorted(objects.iterdir()):
        rows = work / f"{folder.name}.jsonl"
        script = BENCH / f"trial_{folder.name.partition('-')[0]}.py"
        yield Stage(
            folder.name,
            ((sys.executable, "-P", script, "--run", folder, "--output", rows),),
            lambda _, rows=rows: {"tried": _json_lines(rows)},
            45,
            ("tvm_ffi",),
        )


def _json_lines(path: Path) -> list[Found]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _parity(name: str, device: str, work: Path, limit: float, *more: str) -> Stage:
    """Return the stage that compares the demo's scores with a CPU's; a failed gate fails it.

    Both are in float32, in which scores differ by rounding only.
    """
    gpuscore = (sys.executable, "-P", "-m", "gpuscore", "parity")
    bundle = work / name.replace(" ", "-")
    asked = ("--workload", "quick", "--device", device, "--dtype", "float32", *more)
    return Stage(
        name,
        (
            (*gpuscore, "record", "demo", *asked, "--output", bundle),
            (*gpuscore, "compare", GOLDEN / "torch-float32", bundle),
        ),
        lambda printed: {"compared": printed[printed.rfind("scores ") :].splitlines()},
        limit,
        ("msgspec", *(("jax",) if more else ())),
    )


def _http(device: str, work: Path, scratch: Path, trial: bool) -> Stage:
    """Return the stage that times a server of its own with `gpuscore bench`."""
    path = work / "http.json"
    model = ("tiny-float32" if device == "cpu" else "tiny-bfloat16") if trial else ""
    command = (
        *(sys.executable, "-P", "-m", "gpuscore", "bench", "--allow-dirty", "--output", path),
        *("--model", scratch / (model or "qwen3-0.6b-bfloat16"), "--serve", f"--device {device}"),
        *("--scenario", "latency,rerank-static,poisson", "--seconds", "5", "--minutes", "1"),
        *(("--scale", "0.02") if trial else ()),
    )

    def read(printed: str) -> Found:
        # The bundle is written at the end; until then there is what was printed.
        return {"bundle": read_json(path)} if path.is_file() else {"printed": printed}

    return Stage("http", (command,), read, 110, SERVER)


def _tests(name: str, limit: float, work: Path, *chosen: str) -> Stage:
    """Return a stage that runs tests, until its time is up."""
    report = work / f"{name.replace(' ', '-')}.jsonl"
    pytest = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    marked = ("-p", "in_time", "-m", "not hostile")
    command = ("env", f"{OUTCOMES}={report}", *pytest, *marked, *chosen)
    return Stage(name, (command,), lambda _: outcomes(report), limit, PYTEST)


def _workers() -> tuple[str, ...]:
    """Return the options for pytest-xdist, if it is there: compiling kernels takes many cores."""
    has_xdist = importlib.util.find_spec("xdist") is not None
    return ("--numprocesses", "auto", "--maxprocesses", "12") if has_xdist else ()
