"""Output of every bench: the machine, a table, one JSON line."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore.system.machine import commit, local_machine, versions

Row: TypeAlias = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def machine() -> Row:
    """Return the date, the commit, this machine and the versions that figures depend on."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    load = {"load_before": round(os.getloadavg()[0], 2)}
    return {"date": date, "commit": commit()} | local_machine() | load | versions()


def keep(name: str, result: Mapping[str, Any]) -> None:
    """Append one line to results/<name>.jsonl, and print it."""
    line = json.dumps(machine() | result)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
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
    """Return a table's cell: numbers with four digits, nothing for None."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def table(rows: Sequence[Row], names: Sequence[str] = ()) -> str:
    """Return a Markdown table of these columns, by default those of the first row."""
    names = list(names or rows[0])
    lines = [names, ["---"] * len(names), *([short(row.get(n)) for n in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
