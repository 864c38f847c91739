"""The reference for results: transformers in float32, and its own error in bfloat16.

A result is right if its errors in log p against float32 are at most twice transformers' errors in
the same dtype, both at the median and at the maximum. 1e-4 is always allowed, because in float32
transformers' errors are nearly 0. Products in eight bits have errors of their own, so they may have
`slack` times the errors of bfloat16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import baselines
import numpy as np
import torch
from gpu_work import LABELS, Draws, Goal
from numpy.typing import NDArray
from scenarios import Request
from transformers import PreTrainedModel, Qwen3ForCausalLM

ROWS = 128  # at least this many rows are compared per workload, in a quick run 6
ALWAYS = 1e-4  # error that is always allowed
PROMPTS = 8  # whole prompts; their results are compared with results from reused keys and values

Array = NDArray[np.float64]
assert baselines.LABELS == LABELS


@dataclass(frozen=True)
class Verdict:
    """The errors of one result, and the allowed errors."""

    median: float
    largest: float
    allowed_median: float
    allowed_largest: float

    @property
    def right(self) -> bool:
        """True if both errors are allowed; false if one is NaN."""
        return self.median <= self.allowed_median and self.largest <= self.allowed_largest

    def __str__(self) -> str:
        return (
            f"|d log p| median {self.median:.1e} (allowed {self.allowed_median:.1e}), "
            f"max {self.largest:.1e} (allowed {self.allowed_largest:.1e})"
        )


def verdict(got: Sequence[Array], exact: Array, theirs: Array, slack: float = 1.0) -> Verdict:
    """Judge results; `got` may lack the last requests, and each request its last items."""
    pairs = zip(got, exact[: len(got)], strict=True)
    ours = np.concatenate([np.abs(ours - right[: len(ours)]).ravel() for ours, right in pairs])
    bound = np.abs(theirs - exact)
    return Verdict(
        float(np.median(ours)),
        float(ours.max()),
        slack * max(ALWAYS, 2 * float(np.median(bound))),
        slack * max(ALWAYS, 2 * float(bound.max())),
    )


def inputs(goal: Goal, vocab: int, quick: bool) -> list[Request]:
    """Return the requests that are compared, the same ones every time."""
    count = -(-(6 if quick else ROWS) // goal.workload.num_items)
    draws = Draws(goal.workload, vocab, seed=1000)
    return [draws.next() for _ in range(count)]


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, plain: bool = False
) -> PreTrainedModel:
    """Load transformers' model; `plain` chooses its eager attention."""
    model = Qwen3ForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager" if plain else "sdpa"
    )
    return model.to(device).eval()


def compute(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    wanted: Sequence[tuple[Goal, list[Request]]],
) -> Iterator[tuple[str, Array, Array]]:
    """Yield each workload's name and log-probabilities [requests, N, labels] in float32 and dtype.

    Raises:
        RuntimeError: float32 results differ from the results of whole prompts, or results in
            `dtype` are not finite.
    """
    torch.set_float32_matmul_precision("highest")
    exact_model = load(directory, torch.float32, device, plain=True)
    exact = {
        goal.name: np.stack([baselines.reused_query(exact_model, *r) for r in requests])
        for goal, requests in wanted
    }
    for goal, requests in wanted:
        query, items = requests[0]
        whole = baselines.padded_batches(exact_model, query, items[:PROMPTS])
        difference = float(np.abs(whole - exact[goal.name][0, :PROMPTS]).max())
        if not difference <= 10 * ALWAYS:
            raise RuntimeError(f"{goal.name}: float32 differs from itself by {difference:.1e}")
    del exact_model
    model = load(directory, dtype, device)
    for goal, requests in wanted:
        theirs = np.stack([baselines.reused_query(model, *request) for request in requests])
        if not np.isfinite(theirs).all():
            raise RuntimeError(f"{goal.name}: transformers' {dtype} is not finite")
        yield goal.name, exact[goal.name], theirs


class Reference:
    """The results of `compute`, kept in a file."""

    def __init__(self, path: Path, vocab: int, quick: bool) -> None:
        self.path, self.vocab, self.quick = path, vocab, quick

    def make(
        self, directory: Path, dtype: torch.dtype, device: torch.device, goals: Sequence[Goal]
    ) -> dict[str, Verdict]:
        """Compute and keep the reference; return transformers' own errors by workload."""
        wanted = [(goal, inputs(goal, self.vocab, self.quick)) for goal in goals]
        arrays: dict[str, Array] = {}
        errors = {}
        for name, exact, theirs in compute(directory, dtype, device, wanted):
            arrays |= {f"{name}/exact": exact, f"{name}/theirs": theirs}
            errors[name] = verdict([*theirs], exact, theirs)
        np.savez(self.path, **arrays)
        return errors

    def inputs(self, goal: Goal) -> list[Request]:
        return inputs(goal, self.vocab, self.quick)

    def verdict(self, goal: Goal, got: Sequence[Array], slack: float = 1.0) -> Verdict:
        """Judge results for the first requests of `inputs`, or for some first items of each."""
        if not self.path.is_file():
            raise RuntimeError("there is no reference to compare with, so nothing is timed")
        with np.load(self.path) as arrays:
            exact, theirs = arrays[f"{goal.name}/exact"], arrays[f"{goal.name}/theirs"]
        return verdict(got, exact, theirs, slack)
