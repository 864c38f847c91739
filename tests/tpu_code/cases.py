"""Programs of `--backend jax` for TPUs that are not there: models, plans, and arguments as shapes.

This is the only module here that knows `gpuscore.backends.jax`: a plan, its programs' sizes, and
what traces a program.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from gpuscore.backends.jax import plan as planning
from gpuscore.backends.jax.backend import attends_of, pool_shapes
from gpuscore.backends.jax.layout import ProgramSizes
from gpuscore.backends.jax.plan import JaxPlan
from gpuscore.backends.jax.programs import XLA_OPTIONS, TracedPrograms, trace_programs
from gpuscore.backends.jax.weights import weight_shapes_of
from gpuscore.config import ModelConfig
from support.model_configs import LLAMA_1B, QWEN3_06B, QWEN3_8B
from support.quantized import section
from tpu_code.chips import CHIPS, V5E, V6E, Chip

EXTEND, LABELS = "extend", "labels"


@dataclass(frozen=True)
class Model:
    name: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)  # of ModelConfig, per chip
    chips: Sequence[Chip] = (V5E, V6E)


MODELS = (
    Model("Qwen3-0.6B", QWEN3_06B),
    Model("Llama-3.2-1B", LLAMA_1B, {"max_model_len": 40960}),
    Model("Qwen3-8B", QWEN3_8B, chips=(V6E,)),
    # In bfloat16 its weights alone exceed a v5e. Larger batches would leave so little room for
    # pages that a layer's take less than the batch's own arrays, which then look like copies.
    Model(
        "Qwen3-8B int8",
        QWEN3_8B | {"quantization_config": section("int8")},
        {"max_model_len": 32768, "max_batch_tokens": 8192},
        chips=(V5E,),
    ),
)

# A few layers and a small pool, for defects that are planted.
SMALL = Model(
    "small",
    QWEN3_06B | {"num_hidden_layers": 4, "vocab_size": 8192},
    {"kv_cache_size": 2**30, "max_batch_tokens": 64, "max_model_len": 4096},
)


@dataclass(frozen=True)
class Case:
    """One program."""

    model: str
    chip: str
    part: str  # extend or labels
    sizes: ProgramSizes

    @property
    def name(self) -> str:
        pages = f", {self.sizes.pages} pages" if self.part == EXTEND else ""
        return f"{self.model} {self.chip} {self.part} {self.sizes.tokens} tokens{pages}"


def cases(models: Sequence[Model] = MODELS) -> Iterator[Case]:
    """Yield every program of each model on each of its chips, the largest first."""
    for model in models:
        for chip in model.chips:
            sizes = plan_of(model.name, chip.name).sizes()
            for size in reversed(sizes):
                yield Case(model.name, chip.name, EXTEND, size)
            for size in {size.tokens: size for size in sizes}.values():
                yield Case(model.name, chip.name, LABELS, size)


def quick_cases() -> list[Case]:
    """Return what make test-all compiles: the ends of Qwen3-0.6B on v6e, its largest on v5e."""
    extending = [case for case in cases(MODELS[:1]) if case.part == EXTEND]
    v5e, v6e = ([case for case in extending if case.chip == chip.name] for chip in (V5E, V6E))
    return [v6e[0], v6e[-1], v5e[0]]


@cache
def plan_of(model: str, chip: str) -> JaxPlan:
    """Return the plan that `gpuscore serve --backend jax` would make beside this chip."""
    chosen = next(candidate for candidate in (*MODELS, SMALL) if candidate.name == model)
    device = CHIPS[chip].device()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(chosen.config))
        with (
            mock.patch.object(planning, "find_device", return_value=device),
            mock.patch.object(planning, "free_memory", return_value=CHIPS[chip].hbm),
        ):
            return planning.plan_backend(Path(folder), ModelConfig(**chosen.settings))


def batch_bytes(plan: JaxPlan) -> int:
    """Return the bytes that the plan leaves to a batch before any program is compiled."""
    return plan.estimated_bytes(plan.sizes()[-1])


def page_count(plan: JaxPlan, chip: Chip) -> int:
    """Return the number of KV pages that programs are compiled for."""
    return plan.count_pages(chip.hbm - plan.weight_bytes, batch_bytes(plan), estimated=True)


def traced(case: Case) -> Any:
    """Return the program of a case as `jax.stages.Traced`."""
    programs = traced_programs(case.model, case.chip, case.sizes)
    return programs.extend if case.part == EXTEND else programs.labels


@cache
def traced_programs(model: str, chip: str, sizes: ProgramSizes) -> TracedPrograms:
    plan = plan_of(model, chip)
    return trace_programs(
        sizes,
        plan.architecture.config,
        weights_of(plan),
        pool_shapes(plan, page_count(plan, CHIPS[chip])),
        attends_of(plan.attention),
        plan.heads,
        plan.device,
    )


def weights_of(plan: JaxPlan) -> Any:
    return weight_shapes_of(plan.architecture, plan.dtype_name, plan.precision)


def compiler_options(case: Case) -> dict[str, Any]:
    return XLA_OPTIONS
