"""One section of the benches on a card, in a process of its own: a stage of bench/gpu_day.py.

    python -P bench/gpu_sections.py FOLDER NAME --device cpu --trial

Writes its findings into FOLDER after every row, and reads the findings of `ceilings` and
`reference`. The exit code is 1 if a row was wrong or failed.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made here
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the server sets it
import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import gpu_ceiling
from card import clocks
from gpu_day_stages import SECTIONS as NAMES
from gpu_day_stages import found_of
from gpu_reference import Reference, load
from gpu_rows import Effort, Rows, profiled, release
from gpu_variants import DEFAULT, VARIANTS, Variant, facts, plan_of
from gpu_work import goals
from report import Row, read_json, replace_json

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.errors import ConfigError
from gpuscore.measure.bench.random_models import SHAPES, make_model

PROFILED = ("a", "300")
# A trial on a CPU computes in float32, beside which eight bits err by far more.
IN_SINGLES = 256.0


class Section:
    """Model, sizes and findings of one section; `rows` are the rows of its table."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name, self.folder, self.trial = name, folder, options.trial
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.shape = SHAPES[options.shape]
        dtype = str(self.dtype).removeprefix("torch.")
        self.directory = make_model(options.shape, dtype, options.scratch)
        self.goals = goals(self.trial)
        self.reference = Reference(folder / "reference.npz", self.shape["vocab_size"], self.trial)
        self.findings: dict[str, Any] = {"rows": [], "clocks": {"before": clocks()}}

    def kept(self, section: str, key: str, default: Any) -> Any:
        """Return the findings of an earlier section; the default if it failed."""
        path = found_of(self.folder, section)
        return read_json(path).get(key, default) if path.is_file() else default

    @property
    def rows(self) -> Rows:
        effort = Effort(2, 1, 0.5) if self.trial else Effort()
        floors = self.kept("ceilings", "floors", {})
        return Rows(self.goals, self.reference, floors, effort, self.add)

    def add(self, row: Row) -> None:
        self.findings["rows"].append(row)
        self.save()
        print(row, flush=True)

    def save(self) -> None:
        replace_json(found_of(self.folder, self.name), self.findings)

    def run(self) -> bool:
        """Run the section; return True if no row is wrong or failed."""
        SECTIONS[self.name](self)
        self.findings["clocks"]["after"] = clocks()
        self.save()
        return not any(row.get("wrong") or row.get("failed") for row in self.findings["rows"])


def ceilings(section: Section) -> None:
    measured, floors = gpu_ceiling.measure(
        section.shape, section.goals, section.dtype, section.device, section.trial
    )
    section.findings |= {"ceilings": measured, "floors": floors}


def reference(section: Section) -> None:
    errors = section.reference.make(section.directory, section.dtype, section.device, section.goals)
    section.findings["errors of transformers"] = {
        name: str(error) for name, error in errors.items()
    }
    section.findings["tolerance"] = max(1e-4, 4 * max(error.largest for error in errors.values()))


def loaded(section: Section, variant: Variant) -> TorchBackend:
    """Return a warm backend; raises ConfigError if the variant cannot run on this machine."""
    plan = plan_of(section.directory, variant, section.device.type, section.trial)
    section.findings["settings"] = facts(plan)
    backend = TorchBackend(plan)
    backend.warmup()
    return backend


def of_variant(variant: Variant, section: Section) -> None:
    """Measure a variant; the default one also in the engine, which closes its backend."""
    try:
        backend = loaded(section, variant)
    except ConfigError as error:
        section.add({"scorer": variant.name, "unavailable": str(error)})
        return
    default = variant is DEFAULT
    slack = variant.slack
    if slack > 1 and section.dtype == torch.float32:
        slack *= IN_SINGLES
    section.rows.backend(variant.name, backend, judged=default, slack=slack)
    counts = {name: getattr(backend.launcher, name, None) for name in ("replayed", "launched")}
    section.findings["settings"] |= counts
    if default:
        section.rows.engine(backend)
    else:
        backend.close()


def transformers(section: Section) -> None:
    section.rows.transformers(load(section.directory, section.dtype, section.device))


def profile(section: Section) -> None:
    backend = loaded(section, DEFAULT)
    section.findings["profile"] = {
        goal.name: profiled(backend, goal) for goal in section.goals if goal.name in PROFILED
    }
    backend.close()


# The most important first.
SECTIONS: dict[str, Callable[[Section], None]] = {
    "ceilings": ceilings,
    "reference": reference,
    DEFAULT.name: partial(of_variant, DEFAULT),
    "transformers": transformers,
    "profile": profile,
    **{variant.name: partial(of_variant, variant) for variant in VARIANTS},
}
assert tuple(SECTIONS) == NAMES, "gpu_day_stages names the sections without importing torch"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--scratch", type=Path, required=True, help="for weights")
    parser.add_argument("--trial", action="store_true", help="small workloads, few repeats")
    options = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    right = Section(options.name, options.folder, options).run()
    release()
    return int(not right)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of a backend that failed may never end
