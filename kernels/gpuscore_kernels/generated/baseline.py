"""Baselines: numbers of each kernel's variants that the gate holds, one file per Triton version."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from gpuscore_kernels.generated.rules import Row

PACKAGE = Path(__file__).parents[1]
Baseline: TypeAlias = Mapping[str, Row]


def baseline_path(kernel: str, triton: str) -> Path:
    return PACKAGE / kernel / f"compile_baseline.{triton}.json"


def read_baseline(kernel: str, triton: str) -> Baseline:
    """Rows of a kernel's folder; none where there is no file for this version of Triton."""
    path = baseline_path(kernel, triton)
    rows: Baseline = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return rows


def write_baseline(kernel: str, triton: str, rows: Baseline) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    baseline_path(kernel, triton).write_text("{\n" + lines + "\n}\n", encoding="utf-8")
