"""The reference for results: transformers in float32, and its own error in the timed dtype.

It scores whole prompts of items that are spread over each request. A result is right if its errors
in log p against float32 are at most twice transformers' errors in the same dtype, both at the
median and at the maximum. 1e-4 is always allowed, because in float32 transformers' errors are
nearly 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines import Array, padded_batches
from scenarios import Request, Workload
from transformers import AutoModelForCausalLM

ALWAYS = 1e-4  # error that is always allowed


def judge(got: Array, exact: Array, theirs: Array) -> tuple[bool, str]:
    """Return whether results are right, and their errors; they are wrong if one is not finite."""
    ours, bound = np.abs(got - exact), np.abs(theirs - exact)
    right, said = True, []
    for name, size in (("median", np.median), ("max", np.max)):
        found, allowed = float(size(ours)), max(ALWAYS, 2 * float(size(bound)))
        right &= found <= allowed
        said.append(f"{name} {found:.1e} (allowed {allowed:.1e})")
    return right, f"|d log p| {', '.join(said)}"


@dataclass(frozen=True)
class Reference:
    """What transformers computes, kept in a file.

    Args:
        path: the file that `make` writes.
        vocab: ids are drawn below this.
        rows: about so many items are compared per workload.
    """

    path: Path
    vocab: int
    rows: int

    def inputs(self, workload: Workload) -> list[Request]:
        """Return requests of at least `rows` items, the same ones every time."""
        requests = -(-self.rows // workload.num_items)
        return replace(workload, seed=1000, requests=requests).draw_all(self.vocab)

    def _spread(self, of_items: Any) -> Any:
        return of_items[:: max(1, len(of_items) // self.rows)]

    def make(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        workloads: Mapping[str, Workload],
    ) -> dict[str, str]:
        """Compute and keep the reference; return transformers' own errors by workload."""
        torch.set_float32_matmul_precision("highest")
        kept: dict[str, Array] = {}
        for kind, of in (("exact", torch.float32), ("theirs", dtype)):
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=of).to(device).eval()
            for name, workload in workloads.items():
                requests = self.inputs(workload)
                scores = [padded_batches(model, q, self._spread(items)) for q, items in requests]
                kept[f"{name}/{kind}"] = np.concatenate(scores)
                if not np.isfinite(kept[f"{name}/{kind}"]).all():
                    raise RuntimeError(f"{name}: transformers' {of} is not finite")
            del model
        np.savez(self.path, **kept)
        pairs = {name: (kept[f"{name}/theirs"], kept[f"{name}/exact"]) for name in workloads}
        return {name: judge(theirs, exact, theirs)[1] for name, (theirs, exact) in pairs.items()}

    def judge(self, name: str, got: Sequence[Array]) -> tuple[bool, str]:
        """Judge the results for `inputs`."""
        if not self.path.is_file():
            raise RuntimeError("there is no reference to compare with, so nothing is timed")
        chosen = np.concatenate([self._spread(scores) for scores in got])
        with np.load(self.path) as arrays:
            return judge(chosen, arrays[f"{name}/exact"], arrays[f"{name}/theirs"])
