"""The settings of gpuscore that are compared, and how they are loaded."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuscore.backends import plan_backend
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.config import ModelConfig

MAX_MODEL_LEN = 4096
QUICK_TOKENS = 128  # of a batch, and of a graph at most
KV_TOKENS = 32_768  # of all KV pages: enough for these workloads, and leaves memory to others


@dataclass(frozen=True)
class Variant:
    """A name, and fields of ModelConfig.

    `slack` multiplies the errors that are allowed.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    slack: float = 1.0


# On these random weights eight bits err more than bfloat16; a wrong kernel errs by far more.
EIGHT_BITS = 12.0
DEFAULT = Variant("gpuscore")
VARIANTS = (
    Variant("graphs off", {"cuda_graph_tokens": 0}),
    Variant("--kernels torch", {"kernels": "torch"}),
    Variant("--attention triton", {"attention": "triton"}),
    Variant("--attention torch", {"attention": "torch"}),
    Variant("--attention flashinfer", {"attention": "flashinfer"}),
    Variant("--quantization fp8", {"quantization": "fp8"}, slack=EIGHT_BITS),
    Variant("--quantization int8", {"quantization": "int8"}, slack=EIGHT_BITS),
    Variant("--deterministic", {"deterministic": True}),
)


def model_options(directory: Path, device: str, quick: bool) -> dict[str, Any]:
    """Return the fields of ModelConfig that all variants and the server share.

    `quick` makes batches small.
    """
    shape = json.loads((directory / "config.json").read_text())
    number = 4 if device == "cpu" else 2
    per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "device": device,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_size": KV_TOKENS * per_token * number,
        "max_batch_tokens": QUICK_TOKENS if quick else None,
    }


def plan_of(directory: Path, variant: Variant, device: str, quick: bool) -> TorchPlan:
    """Return the variant's plan; raises ConfigError if it cannot run on this machine."""
    options = model_options(directory, device, quick) | variant.config
    return plan_backend(directory, ModelConfig(str(directory), **options))


def facts(plan: TorchPlan) -> dict[str, Any]:
    """Return the settings that a variant's plan has chosen."""
    return {
        "attention": plan.attention,
        "kernels": "triton" if plan.kernels else "torch",
        "graph tokens": plan.graph_tokens,
        "batch tokens": plan.max_tokens,
        "deterministic": plan.deterministic,
    }
