"""Promise: bench/parity.py takes a device for each backend, and refuses what cannot run."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from parity import devices


def test_each_backend_has_a_device():
    assert devices("torch@cuda,jax@tpu") == {"torch": "cuda", "jax": "tpu"}
    assert devices("jax@cpu,torch@cpu") == {"torch": "cpu", "jax": "cpu"}


@pytest.mark.parametrize(
    "text",
    [
        "torch@cpu",
        "torch@cpu,torch@cuda",
        "torch@tpu,jax@tpu",
        "torch@cpu,jax",
        "torch@cpu,jax@gpu",
    ],
)
def test_others_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"does not name|cannot run"):
        devices(text)
