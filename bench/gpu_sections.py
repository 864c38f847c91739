"""One section of bench/gpu_day.py that measures this Python's torch, in a process of its own.

    python -P bench/gpu_sections.py FOLDER NAME --device cpu --trial

Writes its findings into FOLDER after every row, and reads those of `ceilings`. The exit code is 1
if a row was wrong or failed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made here
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the server sets it
import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import gpu_ceiling
from gpu_models import make_fp8
from gpu_reference import Reference
from gpu_rows import Effort, Rows, launched, profiled, release, sustained
from gpu_work import workloads
from report import Row, read_json, replace_json
from torch.nn import functional

from gpuscore.backends import plan_backend
from gpuscore.backends.torch import backend as torch_backend
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.measure.bench.random_models import SHAPES, make_model

MAX_MODEL_LEN = 4096
TRIAL_TOKENS = 128  # of a batch, and of a graph at most
KV_TOKENS = 32_768  # of all KV pages: enough for these workloads, and leaves memory to others
SECONDS = 3.0  # of load, after as many in which the clock settles
# On random weights FP8 errs more than bfloat16; a wrong kernel errs by far more. A trial on a CPU
# computes in float32, beside which eight bits err by far more still.
FP8_SLACK, TRIAL_SLACK = 12.0, 1e5


class Section:
    """Sizes and findings of one section; `rows` are the rows of its table."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name, self.folder, self.trial = name, folder, options.trial
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.scratch = options.scratch
        self.workloads = workloads(self.trial)
        self.findings: dict[str, Any] = {"rows": []}

    def model(self, hybrid: bool = False) -> tuple[Path, Mapping[str, Any]]:
        """Return directory and sizes of Qwen3-0.6B or Qwen3.5-0.8B; in a trial small ones."""
        small = "small-hybrid" if hybrid else "tiny"
        shape = small if self.trial else "qwen3.5-0.8b" if hybrid else "qwen3-0.6b"
        dtype = str(self.dtype).removeprefix("torch.")
        return make_model(shape, dtype, self.scratch), SHAPES[shape]

    def reference(self, hybrid: bool = False) -> Reference:
        name = "reference-hybrid" if hybrid else "reference"
        rows = 6 if self.trial else 16 if hybrid else 128
        return Reference(self.folder / f"{name}.npz", self.model(hybrid)[1]["vocab_size"], rows)

    def measured(self, *names: str, hybrid: bool = False, slack: float = 1.0) -> Rows:
        """Return what measures rows of these workloads, by default of all."""
        chosen = {name: work for name, work in self.workloads.items() if name in names or not names}
        shape = self.model(hybrid)[1]
        rates = self.rates()
        floors = {
            name: gpu_ceiling.floor(shape, work, self.dtype, rates) for name, work in chosen.items()
        }
        effort = Effort(2, 1, 0.5) if self.trial else Effort()
        return Rows(chosen, self.reference(hybrid), floors, effort, self.add, slack)

    def rates(self) -> Mapping[str, float]:
        kept: Mapping[str, float] = read_json(self.folder / "ceilings.json")["rates"]
        return kept

    def add(self, row: Row) -> None:
        self.findings["rows"].append(row)
        self.save()
        print(row, flush=True)

    def save(self) -> None:
        replace_json(self.folder / f"{self.name}.json", self.findings)

    def loaded(self, directory: Path) -> TorchBackend:
        """Return a warm backend with the default settings, and keep those that it chose."""
        plan = self._plan(directory)
        self.findings["settings"] = {
            "attention": plan.attention,
            "graph tokens": plan.graph_tokens,
            "batch tokens": plan.max_tokens,
        }
        try:
            backend = TorchBackend(plan)
        except ConfigError as error:
            # The stage fails, but its rows, each compared with transformers, say more.
            self.add({"scorer": "start", "failed": str(error)})
            torch_backend.check_start = lambda *_: None
            backend = TorchBackend(plan)
        backend.warmup()
        return backend

    def _plan(self, directory: Path) -> TorchPlan:
        config = ModelConfig(
            str(directory),
            device=self.device.type,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_size=KV_TOKENS * self._token_bytes(directory),
            max_batch_tokens=TRIAL_TOKENS if self.trial else None,
        )
        plan = plan_backend(directory, config)
        assert isinstance(plan, TorchPlan)
        return plan

    def _token_bytes(self, directory: Path) -> int:
        shape = read_json(directory / "config.json")
        heads = shape["num_key_value_heads"] * shape["head_dim"]
        return int(2 * shape["num_hidden_layers"] * heads * self.dtype.itemsize)

    def run(self) -> bool:
        """Run the section; return True if no row is wrong or failed."""
        SECTIONS[self.name](self)
        self.save()
        return not any(row.get("wrong") or row.get("failed") for row in self.findings["rows"])


def ceilings(section: Section) -> None:
    """Measure the card's rates, and compute the reference of all workloads."""
    directory, shape = section.model()
    rates = gpu_ceiling.rates(section.dtype, section.device, section.trial)
    section.findings["rates"] = rates
    section.findings["floors"] = {
        name: gpu_ceiling.floor(shape, work, section.dtype, rates)
        for name, work in section.workloads.items()
    }
    section.save()
    errors = section.reference().make(directory, section.dtype, section.device, section.workloads)
    section.findings["errors of transformers"] = {name: str(each) for name, each in errors.items()}


def of_workloads(section: Section) -> None:
    backend = section.loaded(section.model()[0])
    rows = section.measured()
    rows.backend("backend", backend)
    rows.engine(backend)


def under_load(section: Section) -> None:
    """Load the card with the large request and with the product of the ceiling."""
    seconds = 0.3 if section.trial else 2 * SECONDS
    size, dtype, device = 256 if section.trial else 8192, section.dtype, section.device
    x, w = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))

    def product() -> Callable[[], object]:
        functional.linear(x, w)
        if device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    row = sustained(product, seconds, device.type == "cuda")
    rate = 2 * size**3 / row["ms"] * 1e3
    section.add({"scorer": f"{size}^3 product", "TFLOP/s": rate / 1e12} | row)
    backend = section.loaded(section.model()[0])
    row = sustained(launched(backend, section.workloads["a"]), seconds, device.type == "cuda")
    rows = section.measured("a")
    burst, floor = section.rates()["product"], rows.floors["a"]["ms"]
    row["of sustained floor"] = round(floor * burst / rate / row["ms"], 3)
    row["of floor"] = rows.of_floor("a", row["ms"])
    section.add({"scorer": "under load", "workload": "a"} | row)
    backend.close()


def profiles(section: Section) -> None:
    backend = section.loaded(section.model()[0])
    section.findings["profile"] = {
        name: profiled(backend, section.workloads[name]) for name in ("a", "300")
    }
    backend.close()


def hybrid(section: Section) -> None:
    """Measure Qwen3.5's shape against a reference of its own; the engine closes the backend."""
    directory, _ = section.model(hybrid=True)
    rows = section.measured("a", "300", hybrid=True)
    errors = rows.reference.make(directory, section.dtype, section.device, rows.workloads)
    section.findings["errors of transformers"] = {name: str(each) for name, each in errors.items()}
    release()
    backend = section.loaded(directory)
    rows.backend("qwen3.5", backend)
    section.findings["profile"] = {
        name: profiled(backend, work) for name, work in rows.workloads.items()
    }
    rows.engine(backend)


def fp8(section: Section) -> None:
    slack = FP8_SLACK if section.dtype == torch.bfloat16 else TRIAL_SLACK
    backend = section.loaded(make_fp8(section.model()[0]))
    section.measured("b cached", slack=slack).backend("fp8 checkpoint", backend)
    for name in ("replayed", "launched"):
        section.findings["settings"][name] = getattr(backend.launcher, name, None)
    backend.close()


SECTIONS: Mapping[str, Callable[[Section], None]] = {
    "ceilings": ceilings,
    "workloads": of_workloads,
    "under load": under_load,
    "profiles": profiles,
    "hybrid": hybrid,
    "fp8": fp8,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
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
