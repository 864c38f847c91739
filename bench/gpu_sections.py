"""One section of bench/gpu_day.py that measures this Python's torch, in a process of its own.

    python -P bench/gpu_sections.py FOLDER NAME SCRATCH cpu

Writes its findings into FOLDER after every row, and reads those of `ceilings`. Every row's results
are compared with the reference before it is timed. The exit code is 1 if a row was wrong or failed.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made here
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the server sets it
import numpy as np
import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
from baselines import LABELS
from ceiling import card_floor, card_rates
from gpu_work import TRIAL, WORKLOADS, Batches, first_of, launched, product, sustained
from oracle import Reference
from random_models import SHAPES, make_model
from report import Row, read_json, replace_json
from scenarios import Request, Workload

from gpuscore.backends import plan_backend
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.config import ModelConfig, RequestLimits
from gpuscore.engine.engine import Engine
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import Float64Array
from gpuscore.types.results import label_logprobs

MAX_MODEL_LEN = 4096
TRIAL_TOKENS = 128  # of a batch, and of a graph at most
KV_TOKENS = 32_768  # of all KV pages: enough for these workloads, and leaves memory to others
SECONDS = 5.0  # of load; in the first third the clock settles
REPEAT = 15  # measurements


class Section:
    """Sizes and findings of one section; `rows` are the rows of its table."""

    def __init__(self, folder: Path, name: str, scratch: Path, device: str) -> None:
        self.folder, self.name, self.device = folder, name, torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.seconds = SECONDS if self.on_cuda else 0.3
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        shapes = ("qwen3.5-0.8b", "qwen3-0.6b") if self.on_cuda else ("small-hybrid", "tiny")
        hybrid = name == "hybrid"
        shape = shapes[not hybrid]
        self.sizes = SHAPES[shape]
        self.model = make_model(shape, str(self.dtype).removeprefix("torch."), scratch)
        every = WORKLOADS if self.on_cuda else TRIAL
        self.workloads = {n: load for n, load in every.items() if not hybrid or n in ("a", "300")}
        rows = (16 if hybrid else 128) if self.on_cuda else 6
        kept = folder / f"{shape}.npz"
        self.reference = Reference(kept, self.sizes["vocab_size"], rows)
        self.rates: dict[str, float] = {}
        if name != "ceilings":
            self.rates = read_json(folder / "ceilings.json")["rates"]
        self.findings: dict[str, Any] = {"rows": []}

    def add(self, row: Row) -> None:
        self.findings["rows"].append(row)
        self.save()
        print(row, flush=True)

    def save(self) -> None:
        replace_json(self.folder / f"{self.name}.json", self.findings)

    def compute_reference(self) -> None:
        errors = self.reference.make(self.model, self.dtype, self.device, self.workloads)
        self.findings["errors of transformers"] = errors

    def loaded(self, attention: str = "auto") -> TorchBackend:
        """Return a warm backend."""
        heads = self.sizes["num_key_value_heads"] * self.sizes["head_dim"]
        token_bytes = 2 * self.sizes["num_hidden_layers"] * heads * self.dtype.itemsize
        config = ModelConfig(
            str(self.model),
            device=self.device.type,
            attention=attention if self.on_cuda else "auto",
            max_model_len=MAX_MODEL_LEN,
            kv_cache_size=KV_TOKENS * token_bytes,
            max_batch_tokens=None if self.on_cuda else TRIAL_TOKENS,
        )
        plan = plan_backend(self.model, config)
        assert isinstance(plan, TorchPlan)
        backend = TorchBackend(plan)
        backend.warmup()
        return backend

    def each(self, scorer: str, measure: Callable[[str, Workload], Row]) -> None:
        """Add one row per workload; if one workload fails, the others are still measured."""
        for name, workload in self.workloads.items():
            row = {"scorer": scorer, "workload": name, "sizes": str(workload)}
            try:
                row |= measure(name, workload)
            except Exception as error:  # noqa: BLE001  (is reported with the row, and fails the run)
                row["failed"] = f"{type(error).__name__}: {error}"
            self.add(row)

    def floor(self, name: str) -> float:
        return card_floor(self.sizes, self.workloads[name], self.dtype, self.rates)

    def row(
        self, name: str, score: Callable[[Request], Float64Array], seconds: Callable[[], float]
    ) -> Row:
        """Compare scores with the reference, then measure the seconds of requests."""
        workload = self.workloads[name]
        results = [score(request) for request in self.reference.inputs(workload)]
        right, errors = self.reference.judge(name, results)
        if not right:
            return {"errors": errors, "wrong": True}
        seconds()  # warms up
        taken = statistics.median(seconds() for _ in range(REPEAT if self.on_cuda else 1))
        ratio = round(self.floor(name) / (1e3 * taken), 3)
        rate = {"items/s": workload.num_items / taken, "of floor": ratio}
        return {"errors": errors, "ms": 1e3 * taken} | rate

    def on_backend(self, backend: TorchBackend, name: str, workload: Workload) -> Row:
        """Measure packed batches on the device."""
        batches = Batches(backend, workload)
        draws = workload.draws(self.reference.vocab, seed=2000)
        row = self.row(name, batches.score, lambda: batches.seconds(next(draws)))
        return row | {"cached": batches.cached_tokens}

    def in_engine(
        self, engine: Engine, builder: PromptBuilder, name: str, workload: Workload
    ) -> Row:
        """Measure from lists of ids to log-probabilities, as `Scorer` does."""
        draws = workload.draws(self.reference.vocab, seed=3000)

        def score(request: Request) -> Float64Array:
            built = builder.build(ScoreInput(*request, label_token_ids=LABELS))
            assert built is not None
            return np.stack(label_logprobs(engine.score(built).result()))

        def prepared(request: Request) -> Request:
            if (before := first_of(request, workload)) is not None:
                score(before)
            return request

        def alone() -> float:
            request = prepared(next(draws))
            start = time.perf_counter()
            score(request)
            return time.perf_counter() - start

        return self.row(name, lambda request: score(prepared(request)), alone)

    def measure(self, backend: TorchBackend) -> None:
        """Measure a backend, under load for seconds, and in the engine, which closes it."""
        self.each(self.name, partial(self.on_backend, backend))
        load = sustained(launched(backend, self.workloads["a"]), self.seconds, self.on_cuda)
        ratio = self.floor("a") / load["ms"]
        load |= {"scorer": f"{self.name} under load", "workload": "a", "of floor": round(ratio, 3)}
        of_sustained = ratio * self.rates["product"] / self.rates["sustained product"]
        load["of sustained floor"] = round(of_sustained, 3)
        self.add(load)
        engine = Engine(backend)
        builder = PromptBuilder(None, backend.limits, RequestLimits())
        try:
            self.each(f"{self.name}, engine", partial(self.in_engine, engine, builder))
        finally:
            engine.close()

    def ceilings(self) -> None:
        """Measure the card's rates, and compute the reference of all workloads."""
        size, copied = (8192, 1 << 30) if self.on_cuda else (256, 1 << 22)
        self.rates = card_rates(self.dtype, self.device, size, copied)
        load = sustained(product(size, self.dtype, self.device), self.seconds, self.on_cuda)
        self.rates["sustained product"] = 2 * size**3 / load["ms"] * 1e3
        floors = {name: self.floor(name) for name in self.workloads}
        self.findings |= {"rates": self.rates, "floors": floors}
        self.add({"scorer": f"{size}^3 product under load"} | load)
        self.compute_reference()

    def run(self) -> bool:
        """Run the section; return True if no row is wrong or failed."""
        if self.name == "ceilings":
            self.ceilings()
        elif self.name == "hybrid":
            self.compute_reference()
            self.measure(self.loaded())
        else:
            self.measure(self.loaded(self.name))
        self.save()
        return not any(row.get("wrong") or row.get("failed") for row in self.findings["rows"])


def main(folder: str, name: str, scratch: str, device: str) -> int:
    transformers_logging.disable_progress_bar()
    return int(not Section(Path(folder), name, Path(scratch), device).run())


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of a backend that failed may never end
