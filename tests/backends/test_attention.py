"""`ExtendAttention` against the oracle of the mask rule, layer by layer."""

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention import ExtendAttention, padded_length, plan_attention
from gpuscore.backends.torch.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import KVPool
from support.layouts import random_batch
from support.oracle import attention as oracle

PAGE_SIZE, NUM_SLOTS = 4, 512
HEADS, KV_HEADS, DIM = 4, 2, 16
CONFIG = DecoderConfig(
    architecture="",
    vocab_size=9,
    hidden_size=1,
    intermediate_size=1,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=1,
    sliding_window=None,
    tie_word_embeddings=True,
    checkpoint_dtype="float32",
)
CPU = torch.device("cpu")


def poisoned_pool(batch, generator):
    """Random keys and values in the cached slots, NaN everywhere else, page tails included."""
    pool = KVPool(CONFIG, NUM_SLOTS, torch.float32, CPU)
    cached = [
        batch.page_table[r, i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE
        for r, length in enumerate(batch.prefix_lens)
        for i in range(length)
    ]
    for sides in pool.layers:
        for side in sides:
            values = torch.randn(side.shape, generator=generator)
            side.fill_(torch.nan)
            side[:, cached] = values[:, cached]
    return pool


def as_oracle(side):
    return side.permute(1, 0, 2).double().numpy()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed, impl):
    batch = random_batch(np.random.default_rng(seed), NUM_SLOTS, PAGE_SIZE)
    if not batch.num_tokens:
        return
    generator = torch.Generator().manual_seed(seed)
    pool = poisoned_pool(batch, generator)
    before = [as_oracle(side) for side in pool.layers[0]]
    q, k, v = (
        torch.randn(batch.num_tokens, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    plan = plan_attention(batch, PAGE_SIZE, CPU)
    attend = ExtendAttention(plan, pool, DIM**-0.5, impl)
    want = oracle(batch, PAGE_SIZE, *(x.double().numpy() for x in (q, k, v)), *before)
    np.testing.assert_allclose(attend(0, q, k, v).numpy(), want, atol=1e-5, rtol=1e-5)

    # The last layer gets the queries of the scored rows only.
    before = [as_oracle(side) for side in pool.layers[1]]
    rows = torch.from_numpy(batch.score_rows.astype(np.int64))
    want = oracle(batch, PAGE_SIZE, *(x.double().numpy() for x in (q, k, v)), *before)
    got = attend(1, q[rows], k, v).numpy()
    np.testing.assert_allclose(got, want[batch.score_rows], atol=1e-5, rtol=1e-5)

    kept = batch.slot_mapping >= 0
    for layer in pool.layers:
        for side, values in zip(layer, (k, v), strict=True):
            stored = side[:, batch.slot_mapping[kept]].permute(1, 0, 2)
            assert torch.equal(stored, values[torch.from_numpy(kept)])


def test_rows_in_the_middle_of_a_segment_can_be_scored():
    from dataclasses import replace

    batch = random_batch(np.random.default_rng(5), NUM_SLOTS, PAGE_SIZE)
    rows = np.arange(batch.num_tokens, dtype=np.int32)[::3]
    batch = replace(batch, score_rows=rows)
    generator = torch.Generator().manual_seed(0)
    pool = poisoned_pool(batch, generator)
    before = [as_oracle(side) for side in pool.layers[1]]
    q, k, v = (
        torch.randn(batch.num_tokens, heads, DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attend = ExtendAttention(plan_attention(batch, PAGE_SIZE, CPU), pool, DIM**-0.5, "cpu")
    want = oracle(batch, PAGE_SIZE, *(x.double().numpy() for x in (q, k, v)), *before)
    got = attend(1, q[torch.from_numpy(rows.astype(np.int64))], k, v).numpy()
    np.testing.assert_allclose(got, want[rows], atol=1e-5, rtol=1e-5)


def test_padding_is_bounded():
    for length in range(1, 5000):
        padded = padded_length(length)
        assert length <= padded <= max(length + 3, length * 5 // 4)
    assert len({padded_length(n) for n in range(1, 5000)}) < 50
