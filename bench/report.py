"""Output of every bench: the machine, a table, one JSON line."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Return the machine and the versions with which figures were measured."""
    import torch

    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in cpu.splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "amx_bf16": "amx_bf16" in cpu,
        "avx512": "avx512f" in cpu,
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    """Return a package's version; the environment of Ray's tests has not all of them."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Return the commit that is measured; "unknown" without git or a repository.

    "-dirty" is appended if a file is changed or untracked; the benches' results do not count.
    """
    if shutil.which("git") is None:
        return "unknown"

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, cwd=RESULTS.parents[1], check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!bench/results")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def keep(name: str, result: dict[str, Any], path: Path | None = None) -> None:
    """Append one line to `path`, by default results/<name>.jsonl, and print it."""
    line = json.dumps({"date": now(), "commit": commit(), "machine": machine()} | result)
    path = path or RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")
    print(line)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically: a run that ends meanwhile leaves the earlier findings."""
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(fresh, path)


def short(value: Any) -> str:
    """Return a table's cell: numbers with four digits, yes and no, nothing for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of at least one row; the dictionaries have the same keys."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[n]) for n in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
