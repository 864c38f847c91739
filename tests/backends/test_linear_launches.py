"""Promise: on CUDA a linear layer takes at most 12 launches, whatever rows and items there are."""

import importlib.util

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuscore.backends.common.hf_config import DeltaNet
from gpuscore.backends.torch.delta_net.layer import DeltaNetBackend, DeltaWeights
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.backends.torch.kernels import in_triton
from gpuscore.types.batch import Prefix, Segment, pack
from support.batches import NO_PAGES, int32, item_segments
from support.linear_layers import OneLayer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
)
NET = DeltaNet(16, 16, 128, 128, 4, (True,))  # Qwen3.5-0.8B
META = torch.device("meta")
# Operators that only make a tensor, or another view of one.
FREE = {"empty", "new_empty", "view", "slice", "split", "split_with_sizes", "select"}


class Operators(TorchDispatchMode):
    """Counts what torch would launch."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name not in FREE:
            self.launched.append(name)
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched; nothing runs."""
    from gpuscore_kernels.cached_launch import CachedLaunch
    from gpuscore_kernels.delta_net import triton

    names = []

    def launch(self, grid, tensors, numbers):
        assert 0 < grid[1] < 2**16
        given = len(tensors) + len(numbers) + len(self.constants)
        assert given == len(self.kernel.arg_names)
        names.append(self.kernel.fn.__name__)

    monkeypatch.setattr(CachedLaunch, "__call__", launch)
    monkeypatch.setattr(triton, "arch_of", lambda tensor: 90)  # "meta" is no device of CUDA
    return names


def query(tokens, *items):
    """Return a query whose state is kept at its end and before it, and its items."""
    states = [(min(512, tokens - 1), 1), (tokens, 0)]
    first = Segment(int32([0] * tokens), 0, 0, states=states)
    behind = item_segments([[0] * n for n in items], tokens, 0, 0, [1])
    return pack([first, *behind], [Prefix(0, NO_PAGES)])


@pytest.mark.parametrize(
    ("batch", "most"),
    [
        (query(2000, *[20] * 500), 6),
        (query(120, *[180] * 10), 6),
        (query(300), 5),
    ],
    ids=["large", "long items", "one prompt"],
)
def test_launches(launched, batch, most):
    config = OneLayer(NET)
    pool = StatePool(config, 4, torch.bfloat16, META)
    layers = DeltaNetBackend(config, pool, in_triton, "triton").prepare(batch)
    shapes = (4, NET.convolved), (16,), (16,), (128,)
    weights = DeltaWeights(*(torch.empty(shape, device=META) for shape in shapes))
    columns = NET.convolved + 16 * (128 + 2)
    product = torch.empty(batch.num_tokens, columns, dtype=torch.bfloat16, device=META)
    with Operators() as operators:
        out = layers.run(0, weights, product)
    assert out.shape == (batch.num_tokens, 16 * 128)
    assert operators.launched == []
    assert len(launched) == most <= 12
    assert np.unique(launched).tolist() == [
        *("convolve_kernel", "gated_norm_kernel", "keep_tails_kernel"),
        *("systems_kernel", "walk_kernel"),
    ]
