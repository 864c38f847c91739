"""The reference for results: transformers in float32, and its own error in bfloat16.

A result is right if its errors in log p against float32 are at most twice transformers' errors in
the same dtype, both at the median and at the maximum. 1e-4 is always allowed, because in float32
transformers' errors are nearly 0. Products in eight bits have errors of their own, so they may have
`slack` times the errors of bfloat16.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import baselines
import numpy as np
import torch
from gpu_work import LABELS, Draws
from numpy.typing import NDArray
from scenarios import Request, Workload
from transformers import AutoModelForCausalLM, PreTrainedModel

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


def verdict(got: Sequence[Array], exact: Array, theirs: Array) -> Verdict:
    """Judge results; `got` may lack the last requests, and each request its last items."""
    pairs = zip(got, exact[: len(got)], strict=True)
    ours = np.concatenate([np.abs(ours - right[: len(ours)]).ravel() for ours, right in pairs])
    bound = np.abs(theirs - exact)
    return Verdict(
        float(np.median(ours)),
        float(ours.max()),
        max(ALWAYS, 2 * float(np.median(bound))),
        max(ALWAYS, 2 * float(bound.max())),
    )


def inputs(workload: Workload, vocab: int, rows: int) -> list[Request]:
    """Return requests of at least so many rows that are compared, the same ones every time."""
    draws = Draws(workload, vocab, seed=1000)
    return [draws.next() for _ in range(-(-rows // workload.num_items))]


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, plain: bool = False
) -> PreTrainedModel:
    """Load transformers' model; `plain` chooses its eager attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager" if plain else "sdpa"
    )
    return model.to(device).eval()


def compute(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    wanted: Mapping[str, list[Request]],
) -> Iterator[tuple[str, Array, Array]]:
    """Yield each workload's name and log-probabilities [requests, N, labels] in float32 and dtype.

    Raises:
        RuntimeError: float32 results differ from the results of whole prompts, or results in
            `dtype` are not finite.
    """
    torch.set_float32_matmul_precision("highest")
    exact_model = load(directory, torch.float32, device, plain=True)
    linear = "linear_attention" in (exact_model.config.layer_types or ())
    reused: Callable[..., Array] = baselines.reused_states if linear else baselines.reused_query
    exact = {
        name: np.stack([reused(exact_model, *request) for request in requests])
        for name, requests in wanted.items()
    }
    for name, requests in wanted.items():
        query, items = requests[0]
        whole = baselines.padded_batches(exact_model, query, items[:PROMPTS])
        difference = float(np.abs(whole - exact[name][0, :PROMPTS]).max())
        # Chunks of linear layers begin elsewhere in a whole prompt.
        if not difference <= (100 if linear else 10) * ALWAYS:
            raise RuntimeError(f"{name}: float32 differs from itself by {difference:.1e}")
    del exact_model
    model = load(directory, dtype, device)
    for name, requests in wanted.items():
        theirs = np.stack([reused(model, *request) for request in requests])
        if not np.isfinite(theirs).all():
            raise RuntimeError(f"{name}: transformers' {dtype} is not finite")
        yield name, exact[name], theirs


class Reference:
    """The results of `compute`, kept in a file.

    Args:
        path: of the file, which `make` writes.
        vocab: ids are drawn below this.
        rows: at least so many are compared per workload.
    """

    def __init__(self, path: Path, vocab: int, rows: int) -> None:
        self.path, self.vocab, self.rows = path, vocab, rows

    def make(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        wanted: Mapping[str, Workload],
    ) -> dict[str, Verdict]:
        """Compute and keep the reference; return transformers' own errors by workload."""
        arrays: dict[str, Array] = {}
        errors = {}
        requests = {name: self.inputs(work) for name, work in wanted.items()}
        for name, exact, theirs in compute(directory, dtype, device, requests):
            arrays |= {f"{name}/exact": exact, f"{name}/theirs": theirs}
            errors[name] = verdict([*theirs], exact, theirs)
        np.savez(self.path, **arrays)
        return errors

    def inputs(self, workload: Workload) -> list[Request]:
        return inputs(workload, self.vocab, self.rows)

    def verdict(self, name: str, got: Sequence[Array]) -> Verdict:
        """Judge results for the first requests of `inputs`, or for some first items of each."""
        if not self.path.is_file():
            raise RuntimeError("there is no reference to compare with, so nothing is timed")
        with np.load(self.path) as arrays:
            exact, theirs = arrays[f"{name}/exact"], arrays[f"{name}/theirs"]
        return verdict(got, exact, theirs)
