"""Promise: the torch backend with `--kernels triton` scores as with torch, in the interpreter or on
a GPU."""

import numpy as np
import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch import backend as backend_module
from gpuscore.config import ModelConfig
from gpuscore.types.batch import Prefix, Segment, pack, page_slots
from gpuscore_kernels.cached_launch import CachedLaunch
from support.batches import Pages, int32, item_segments
from support.kernels import DEVICE
from support.slow import slow
from support.token_ids import random_ids

LABELS = [3, 17]
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
LINEAR = {
    "convolve_kernel",
    "keep_tails_kernel",
    "systems_kernel",
    "walk_kernel",
    "gated_norm_kernel",
}


@pytest.fixture
def make(tiny_model, quick_start):
    made = []

    def start(family, special, kernels, **options):
        directory, _ = tiny_model(family, **special)
        config = ModelConfig(
            str(directory),
            dtype="float32",
            attention="torch",
            kernels=kernels,
            max_model_len=16,
            kv_cache_size=2**22,
            **{"device": DEVICE, "max_batch_tokens": 8, **options},
        )
        made.append(create_backend(plan_backend(directory, config)))
        return made[-1]

    yield start
    for backend in made:
        backend.close()


def scores(backend):
    """Return the scores of a query's first chunk, kept in pages, and of its rest with items beside
    it."""
    return [backend.collect(backend.extend(b)) for b in batches(backend.limits.page_size)]


def batches(page_size):
    rng = np.random.default_rng(0)
    pages = Pages.shuffled(rng, 8, page_size).of(0, 12)
    query = int32(random_ids(rng, 8))
    slots = page_slots(pages, 0, 4, page_size)
    first = Segment(query[:4], 0, 0, slots=slots, states=[(4, 0)])
    yield pack([first], [Prefix(0, pages)])
    items = [random_ids(rng, n) for n in (1, 3)]
    segments = [Segment(query[4:], 4, 0), *item_segments(items, 8, 0, 0, labels=LABELS)]
    yield pack(segments, [Prefix(4, pages, 0)], num_top=1)


@pytest.fixture
def used(monkeypatch):
    """Names of the kernels that were launched, except attention's."""
    names, launch = set(), CachedLaunch.__call__

    def record(self, *arguments):
        names.add(self.kernel.fn.__name__)
        names.discard("extend_attention_kernel")
        launch(self, *arguments)

    monkeypatch.setattr(CachedLaunch, "__call__", record)
    return names


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a.label_logits, b.label_logits, atol=2e-4)
        assert (a.lse is None) == (b.lse is None)
        if b.lse is not None:
            np.testing.assert_allclose(a.lse, b.lse, atol=2e-4)
            np.testing.assert_array_equal(a.top_ids, b.top_ids)


@pytest.mark.parametrize(
    ("family", "special", "others"),
    [
        ("qwen3", {"num_hidden_layers": 2}, set()),
        *slow(
            (
                "gemma3",
                {
                    "num_hidden_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"],
                    "final_logit_softcapping": 6.0,
                },
                set(),
            ),
            ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": [1]}, set()),
            ("qwen3_5", HYBRID, LINEAR),
        ),
    ],
)
def test_scores_equal_those_of_torch(make, used, family, special, others):
    expected = scores(make(family, special, "torch"))
    assert used == set()
    backend = make(family, special, "triton")
    used.clear()  # forget the launches of the start
    assert_same(scores(backend), expected)
    assert used == {
        "add_rms_norm_kernel",
        "gated_kernel",
        "qk_norm_rope_store_kernel",
        "label_logits_kernel",
        "slice_statistics_kernel",
        "merge_slices_kernel",
        *others,
    }


@pytest.mark.slow
def test_tiles_of_fixed_size_do_as_well(make, monkeypatch):
    """With --deterministic, and tiles smaller than it uses in service."""
    monkeypatch.setattr(backend_module, "STEADY_ROWS", 8)
    special = {"num_hidden_layers": 2}
    expected = scores(make("qwen3", special, "torch"))
    backend = make("qwen3", special, "triton", deterministic=True, max_batch_tokens=128)
    assert_same(scores(backend), expected)
