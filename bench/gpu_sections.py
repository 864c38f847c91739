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
from gpu_reference import Reference
from gpu_rows import Effort, Rows, launched, profiled, release, sustained
from gpu_work import workloads
from random_models import SHAPES, make_model
from report import Row, read_json, replace_json
from torch.nn import functional

from gpuscore.backends import plan_backend
from gpuscore.backends.torch import backend as torch_backend
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

MAX_MODEL_LEN = 4096
TRIAL_TOKENS = 128  # of a batch, and of a graph at most
KV_TOKENS = 32_768  # of all KV pages: enough for these workloads, and leaves memory to others
SECONDS = 5.0  # of load; in the first third the clock settles


class Section:
    """Sizes and findings of one section; `rows` are the rows of its table."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name, self.folder, self.trial = name, folder, options.trial
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.scratch = options.scratch
        self.workloads = workloads(self.trial)
        self.on_cuda = self.device.type == "cuda"
        self.seconds = 0.3 if self.trial else SECONDS
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

    def measured(self, *names: str, hybrid: bool = False) -> Rows:
        """Return what measures rows of these workloads, by default of all."""
        chosen = {name: work for name, work in self.workloads.items() if name in names or not names}
        shape = self.model(hybrid)[1]
        rates = self.rates()
        floors = {
            name: gpu_ceiling.floor(shape, work, self.dtype, rates) for name, work in chosen.items()
        }
        effort = Effort(2, 1, 0.5) if self.trial else Effort()
        return Rows(chosen, self.reference(hybrid), floors, effort, self.add)

    def rates(self) -> Mapping[str, float]:
        kept: Mapping[str, float] = read_json(self.folder / "ceilings.json")["rates"]
        return kept

    def add(self, row: Row) -> None:
        self.findings["rows"].append(row)
        self.save()
        print(row, flush=True)

    def save(self) -> None:
        replace_json(self.folder / f"{self.name}.json", self.findings)

    def loaded(self, directory: Path, attention: str = "auto") -> TorchBackend:
        """Return a warm backend, and keep the settings that it chose."""
        plan = self._plan(directory, attention if self.on_cuda else "auto")
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

    def _plan(self, directory: Path, attention: str) -> TorchPlan:
        config = ModelConfig(
            str(directory),
            device=self.device.type,
            attention=attention,
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
    size = 256 if section.trial else 8192
    load = sustained(product(size, section.dtype, section.device), section.seconds, section.on_cuda)
    rates["sustained product"] = 2 * size**3 / load["ms"] * 1e3
    section.add({"scorer": f"{size}^3 product under load"} | load)
    errors = section.reference().make(directory, section.dtype, section.device, section.workloads)
    section.findings["errors of transformers"] = {name: str(each) for name, each in errors.items()}


def product(
    size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Callable[[], object]]:
    """Return what queues a product of square matrices and returns what waits for it."""
    x, w = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))

    def launch() -> Callable[[], object]:
        functional.linear(x, w)
        if device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return launch


def of_attention(section: Section) -> None:
    """Measure all workloads with the attention that the section is named after: on the device,
    under load, by kernels, and in the engine, which closes the backend."""
    backend = section.loaded(section.model()[0], section.name)
    rows, rates = section.measured(), section.rates()
    rows.backend(section.name, backend)
    load = sustained(launched(backend, section.workloads["a"]), section.seconds, section.on_cuda)
    share, burst = rows.of_floor("a", load["ms"]) or 0.0, rates["product"]
    load["of sustained floor"] = round(share * burst / rates["sustained product"], 3)
    row = {"scorer": f"{section.name} under load", "workload": "a", "of floor": share}
    section.add(row | load)
    section.findings["profile"] = {
        name: profiled(backend, section.workloads[name]) for name in ("a", "300")
    }
    rows.engine(f"{section.name}, engine", backend)


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
    rows.engine("qwen3.5, engine", backend)


SECTIONS: Mapping[str, Callable[[Section], None]] = {
    "ceilings": ceilings,
    "triton": of_attention,
    "fa4": of_attention,
    "hybrid": hybrid,
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
