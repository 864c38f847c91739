"""One directory served by transformers and by us, with one key of config.json changed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError, GpuscoreError
from support.models import VOCAB, random_ids, reference_logits, reference_logprobs

CLOSE = 1e-3  # difference in log p; a key that matters changes more
ABSENT = "<absent>"
ODD: tuple[object, ...] = (ABSENT, None, False, True, 0, 1, 3, -1, 0.5, "x", [], [1], {}, {"a": 1})
PROMPTS = [random_ids(np.random.default_rng(5), length) for length in (9, 40)]
Answer = NDArray[np.float64] | str

logging.set_verbosity_error()


def changed(directory: Path, base: dict[str, Any], fields: dict[str, object]) -> None:
    """Write config.json with the fields changed."""
    made = base | fields
    kept = {name: value for name, value in made.items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(kept))


def theirs(directory: Path) -> Answer:
    """Return transformers' log-probabilities, or class logits; or the name of its error."""
    classes = "classes" in directory.name
    auto = AutoModelForSequenceClassification if classes else AutoModelForCausalLM
    try:
        model = auto.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return (reference_logits if classes else reference_logprobs)(model, PROMPTS)
    except Exception as error:  # noqa: BLE001  (any error for such a file)
        return type(error).__name__


def ours(directory: Path) -> Answer:
    """Return our log-probabilities or class logits; or our refusal."""
    try:
        with Scorer(str(directory), dtype="float32", max_batch_tokens=64) as scorer:
            plan = plan_backend(directory, ModelConfig(str(directory)))
            rows = plan.architecture.config.label_rows
            labels: Sequence[int] = list(range(rows))
            scores = scorer.score([], PROMPTS, label_token_ids=labels, logprobs=True, logits=True)
            answer = scores.logprobs if rows == VOCAB else scores.logits
            assert answer is not None
            return answer
    except (ConfigError, GpuscoreError) as error:  # such as a prompt over the limit
        return str(error)


def difference(directory: Path) -> float | None:
    """Return the largest difference of the two answers; None if one of them is an error."""
    mine = ours(directory)
    if isinstance(mine, str):
        return None
    their = theirs(directory)
    return None if isinstance(their, str) else float(np.abs(mine - their).max())
