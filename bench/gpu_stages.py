"""The stages of bench/gpu_day.py, the most valuable first: commands, limits, readers."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from in_time import OUTCOMES, outcomes
from report import read_json

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
GOLDEN = ROOT / "tests" / "fixtures" / "golden"  # recorded on a CPU, float32, by `make golden`
ENGINE = ("msgspec", "transformers", "tokenizers")  # its requests are structs of msgspec
SERVER = ("fastapi", "uvicorn", "httptools", "msgspec", "httpx", "tokenizers", "prometheus_client")
PYTEST = ("pytest", "msgspec", "hypothesis")
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


def stages(device: str, work: Path, *, trial: bool, fa4: bool = False) -> list[Stage]:
    """Return all stages of the day.

    Args:
        device: cuda or cpu.
        work: folder that gets the stages' files.
        trial: with small sizes.
        fa4: measure this attention, too.
    """
    scratch = work / "weights" if trial else ROOT / "scratch"
    own = ("--device", device, "--scratch", scratch, *(("--trial",) if trial else ()))

    def section(name: str, limit: float) -> Stage:
        command = (sys.executable, "-P", BENCH / "gpu_sections.py", work, name, *own)
        return Stage(name, (command,), lambda _: read_json(work / f"{name}.json"), limit, ENGINE)

    planned = [
        section("ceilings", 80),
        section("triton", 100),
        *([section("fa4", 100)] if fa4 else []),
        _http(device, work, scratch, trial),
        section("hybrid", 80),
        _parity("jax", device, work, 90, "--backend", "jax"),
        _parity("parity with a CPU", device, work, 40),
    ]
    if trial:  # a CPU may have other work
        planned = [*planned, _tests("tests", 300, work, *TRIAL_TESTS)]
        return [replace(each, limit=4 * each.limit) for each in planned]
    done = [f"--ignore={path}" for path in (LINEAR, *ATTENTION)]
    return [
        *planned,
        _tests("tests of attention", 60, work, *_workers(), *ATTENTION),
        _tests("tests of linear layers", 60, work, *_workers(), LINEAR),
        _tests("tests alone", 60, work, ALONE),
        _tests("tests", 300, work, *_workers(), *done, *REST),
    ]


def _parity(name: str, device: str, work: Path, limit: float, *more: str) -> Stage:
    """Return the stage that compares the demo's scores with a CPU's; a failed gate fails it.

    Both are in float32, in which scores differ by rounding only.
    """
    gpuscore = (sys.executable, "-P", "-m", "gpuscore", "parity")
    bundle = work / f"{name.replace(' ', '-')}.json"
    asked = ("--workload", "quick", "--device", device, "--dtype", "float32", *more)
    return Stage(
        name,
        (
            (*gpuscore, "record", "demo", *asked, "--output", bundle),
            (*gpuscore, "compare", GOLDEN / "torch-float32.json", bundle),
        ),
        lambda printed: {"compared": printed[printed.rfind("Scores\n") :].splitlines()},
        limit,
        (*ENGINE, *(("jax",) if more else ())),
    )


def _http(device: str, work: Path, scratch: Path, trial: bool) -> Stage:
    """Return the stage that times a server of its own with `gpuscore bench`."""
    path = work / "http.json"
    model = ("tiny-float32" if device == "cpu" else "tiny-bfloat16") if trial else ""
    command = (
        *(sys.executable, "-P", "-m", "gpuscore", "bench", "--output", path),
        *("--model", scratch / (model or "qwen3-0.6b-bfloat16"), "--serve", f"--device {device}"),
        *("--scenario", "latency,poisson", "--rate", "70%", "--seconds", "8"),
        *("--minutes", "0.4", *(("--scale", "0.02") if trial else ())),
    )

    def read(printed: str) -> Found:
        # The bundle is written at the end; until then there is what was printed.
        return {"bundle": read_json(path)} if path.is_file() else {"printed": printed}

    return Stage("http", (command,), read, 80, SERVER)


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
