"""Scores from transformers, to compare with: whole prompts without padding, cache or packing."""

import gc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpuscore.backends.torch.devices import choose_device
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.measure.results import CaseResult, Measured
from gpuscore.measure.workload import Case, Ids, Workload
from gpuscore.models.hub import model_name
from gpuscore.system.extras import install
from gpuscore.types.batch import Float64Array

# Most attention scores of a batch, per head: 64 MiB in float32.
ATTENTION_SCORES = 2**24
MOST_PROMPTS = 64


def run_oracle(directory: Path, config: ModelConfig, dtype: str, workload: Workload) -> Measured:
    """Score every case with --device (the CPU, if that is a TPU) and --threads; then free the
    memory for the backend.

    Raises:
        ConfigError: the device cannot be used.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = "cpu" if config.device == "tpu" else choose_device(config.device).type
    oracle = Oracle(directory, dtype, device)
    results = {case.name: oracle.score(case) for case in workload.cases}
    del oracle
    gc.collect()
    if torch.cuda.is_available():  # backends plan with the free memory
        torch.cuda.empty_cache()
    return Measured(
        *(f"transformers:{dtype}", model_name(config.model), dtype),
        facts={"device": device},
        workload=workload,
        results=results,
    )


class Oracle:
    """A transformers model in one number format, with eager attention over the full mask.

    Raises:
        ConfigError: transformers is not installed.
    """

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(
                "the oracle of this comparison is transformers, which is not installed: "
                f"{install('parity')}"
            ) from error
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        options: Any = {"attn_implementation": "eager", "trust_remote_code": False}
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), **options
        )
        self._model = model.to(device).eval()
        self._device = device

    def score(self, case: Case) -> CaseResult:
        """Score whole prompts, in batches of prompts of equal length."""
        prompts = case.prompt_ids()
        logits: list[Any] = [None] * len(prompts)
        lse = np.empty(len(prompts))
        for rows in _equal_length_batches(prompts):
            tokens = torch.tensor([prompts[row] for row in rows], device=self._device)
            with torch.inference_mode():  # PyTorch's default: no TF32 in products
                out = self._model(tokens, use_cache=False, logits_to_keep=1).logits
            for row, values in zip(rows, out[:, -1].double().cpu(), strict=True):
                logits[row] = values[case.label_ids[row]].numpy()
                lse[row] = torch.logsumexp(values, dim=0).item()
        return _case_result(case, logits, lse)


def _case_result(case: Case, label_logits: list[Float64Array], lse: Float64Array) -> CaseResult:
    """Compute scores, independently of gpuscore's own code for them, from each item's label logits
    and `lse`, the log-sum-exp over the vocabulary [N]."""
    values = np.full((len(label_logits), max(map(len, label_logits))), np.nan)
    mass = np.zeros(len(label_logits))
    for row, logits in enumerate(label_logits):
        if case.apply_softmax:
            scaled = logits / case.temperature
            values[row, : len(logits)] = scaled - np.logaddexp.reduce(scaled)
            continue
        values[row, : len(logits)] = logits - lse[row]
        _, first = np.unique(case.label_ids[row], return_index=True)
        mass[row] = np.exp(values[row, first]).sum()
    return CaseResult(values, None if case.apply_softmax else mass)


def _equal_length_batches(prompts: list[Ids]) -> Iterator[list[int]]:
    """Yield batches of prompts of one length, by index, so that none needs padding."""
    by_length = defaultdict(list)
    for row, prompt in enumerate(prompts):
        by_length[len(prompt)].append(row)
    for length, rows in by_length.items():
        count = min(MOST_PROMPTS, max(1, ATTENTION_SCORES // length**2))
        for start in range(0, len(rows), count):
            yield rows[start : start + count]
