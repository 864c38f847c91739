"""The findings of a run of bench/gpu.py: one JSON file, rewritten after every finding.

Also prints them as tables. This module needs only Python's standard library.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from report import table

SHOWN = (
    *("scorer", "workload", "sizes", "device ms", "wall ms", "items/s", "of floor"),
    *("goal", "met"),
)
FAILED = ("failed", "died")


@dataclass
class State:
    """Findings and their file; a section's status is running, done, failed, died or skipped."""

    path: Path
    found: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> "State":
        return State(path, json.loads(path.read_text()))

    def save(self) -> None:
        replace_json(self.path, self.found)

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        return cast("dict[str, dict[str, Any]]", self.found["sections"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self.found["rows"])

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.save()
        print("  " + line_of(row), flush=True)

    def begin(self, section: str, limit: float) -> None:
        self.sections[section] = {"status": "running", "began": time.time(), "limit": limit}
        self.save()
        print(f"{section}:", flush=True)

    def end(self, section: str, status: str, why: str | None = None) -> None:
        began = self.sections.get(section, {}).get("began")
        self.sections[section] = {"status": status} | ({"why": why} if why else {})
        if began is not None:
            self.sections[section]["seconds"] = round(time.time() - began, 1)
        self.save()
        if why:
            print(f"  {section} {status}: {why}", flush=True)

    def died(self, code: int) -> bool:
        """Close the section during which a process ended; return False if there was none."""
        running = [name for name, about in self.sections.items() if about["status"] == "running"]
        for name in running:
            about = self.sections[name]
            if time.time() - about["began"] < about["limit"]:
                self.end(name, "died", f"the process ended with {code}, see what it printed")
            elif self.time_is_up:
                self.end(name, "skipped", "the time was up before it was through")
            else:
                self.end(name, "died", f"it took more than {about['limit']:.0f} s")
        return bool(running)

    @property
    def time_is_up(self) -> bool:
        return time.time() >= float(self.found["deadline"]) - 1

    def skip_the_rest(self) -> None:
        for name in self.found["planned"]:
            if name not in self.sections:
                self.end(name, "skipped", "no time was left")

    def close(self) -> None:
        """Remove the entries that only the run itself needed."""
        for name in ("work", "deadline", "planned", "scratch"):
            self.found.pop(name, None)
        self.save()

    @property
    def complaints(self) -> list[str]:
        """Failures of the run: failed sections, wrong and failed rows."""
        sections = [
            f"{name} {about['status']}: {about.get('why')}"
            for name, about in self.sections.items()
            if about["status"] in FAILED
        ]
        bad = [row for row in self.rows if row.get("wrong") or row.get("failed")]
        return sections + [line_of(row) for row in bad]

    def summary(self) -> str:
        """Return the machine, its ceilings, the floors and the rows as text."""
        parts = [f"{key}: {self.found.get(key)}" for key in ("machine", "clocks", "ceilings")]
        floors = self.found.get("floors", {})
        names = ("sizes", "tokens", "TFLOP", "ms", "at shapes ms", "linear TFLOP/s", "items/s")
        if floors:
            parts.append(
                table(
                    [
                        {"floor of": name} | {key: _short(floor[key]) for key in names}
                        for name, floor in floors.items()
                    ]
                )
            )
        if self.rows:
            parts.append(table([{key: _cell(row, key) for key in SHOWN} for row in self.rows]))
        for name, about in self.sections.items():
            if about["status"] != "done":
                parts.append(f"{name}: {about['status']}: {about.get('why')}")
        return "\n\n".join(parts)


def replace_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file atomically: a run that ends meanwhile leaves the earlier findings."""
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(fresh, path)


def line_of(row: dict[str, Any]) -> str:
    """Return a row as one line, for people who watch the run."""
    about = ", ".join(str(row[key]) for key in ("scorer", "workload") if key in row)
    for key in ("failed", "unavailable"):
        if key in row:
            return f"{about}: {key}: {row[key]}"
    if row.get("wrong"):
        return f"{about}: WRONG, not timed: {row['errors']}"
    keys = ("device ms", "wall ms", "items/s", "of floor", "goal", "met", "errors", "sample")
    return f"{about}: " + ", ".join(f"{key} {_short(row[key])}" for key in keys if key in row)


def _cell(row: dict[str, Any], key: str) -> str:
    for bad in ("wrong", "failed", "unavailable"):
        if row.get(bad):
            return bad.upper() if key == "wall ms" else str(row.get(key, ""))
    return _short(row.get(key, ""))


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)
