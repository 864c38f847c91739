"""LoRA adapters made by peft, with its answers; `python -m fixtures.adapters` makes them anew."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "adapters"
BASE = FOLDER / "base"
PROMPTS = ([5, 9, 3], [17, 2, 60, 33, 8, 8, 41], list(range(40)))
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """An adapter: the settings of peft's LoraConfig, and the classes of its head, if it has one."""

    settings: Mapping[str, Any]
    classes: int | None = None


CASES = {
    "all-layers": Case({"r": 3, "lora_alpha": 6, "target_modules": [*_LINEAR, "embed_tokens"]}),
    "patterns": Case(
        {
            **{"r": 4, "lora_alpha": 2, "target_modules": _LINEAR},
            **{"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.1\..*q_proj": 12}},
        }
    ),
    "rank-stabilised": Case(
        {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["v_proj", "lm_head"]}
    ),
    "saved-weights": Case(
        {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    ),
    **{
        f"classes-{n}": Case(
            {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}, n
        )
        for n in (1, 2, 3)
    },
}
