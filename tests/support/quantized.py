"""Quantised checkpoints of tests/fixtures/make, with what the libraries that made them answer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[1] / "fixtures" / "quantized"
NAMES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/expected.npz")))


@dataclass(frozen=True)
class Recorded:
    """Hold prompts and float32 log-probabilities [prompts, vocabulary] of their last positions.

    `w8a8`: activations quantised, INT8 by max / 127. `w8a16`: weights dequantised, activations as
    they are. `own`: for INT8, with compressed-tensors' own range of -128..127, where no two
    computations break a row's tie alike; fixtures/make/answers.py says more."""

    directory: Path
    prompts: list[NDArray[np.int32]]
    w8a8: NDArray[np.float32]
    w8a16: NDArray[np.float32]
    own: NDArray[np.float32] | None


def recorded(name: str) -> Recorded:
    """Return the record of a checkpoint in tests/fixtures/quantized."""
    with np.load(FOLDER / name / "expected.npz") as record:
        prompts = np.split(record["ids"], np.cumsum(record["lengths"])[:-1])
        return Recorded(
            FOLDER / name,
            prompts,
            record["w8a8"],
            record["w8a16"],
            record.get("w8a8_own"),
        )
