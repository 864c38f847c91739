"""Promise: `partial_attention` and the merge equal NumPy float64."""

import numpy as np
import pytest
import torch

from gpuscore_kernels.partial_attention import merge_partials, partial_attention
from support.slow import slow

IMPLEMENTATIONS = ["reference", "cpu"]
HALVES = (torch.bfloat16, torch.float16)
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [  # batch, heads, KV heads, rows, keys, head size
    (1, 1, 1, 1, 1, 8),
    (1, 4, 2, 63, 111, 16),
    (3, 4, 1, 1, 63, 24),
    (2, 6, 6, 111, 1, 64),
    (5, 8, 2, 20, 20, 128),
    (1, 2, 2, 700, 33, 16),
]


def expected(q, k, v, scale, visible, softcap=None):
    """Return float64 [B, H, M, D] and [B, H, M]; `visible` is bool, broadcastable to [B, H, M,
    S]."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores, -np.inf)
    with np.errstate(divide="ignore"):
        top = np.maximum(scores.max(-1, keepdims=True, initial=-1e300), -1e300)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        lse = (np.log(total) + top)[..., 0]
    out = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ v
    return out, np.where(total[..., 0] > 0, lse, -np.inf)


def inputs(shape, dtype, seed=0):
    batch, heads, kv_heads, rows, keys, dim = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def check(got, references, dtype):
    for value, reference in zip(got, references, strict=True):
        np.testing.assert_allclose(
            value.double().numpy(), reference, atol=DTYPES[dtype], rtol=DTYPES[dtype]
        )
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_key_visible(shape, dtype, impl):
    q, k, v = inputs(shape, dtype)
    got = partial_attention(q, k, v, scale=0.3, impl=impl)
    check(got, expected(q, k, v, 0.3, np.True_), dtype)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 63, 111])
def test_causal(length, dtype, impl):
    q, k, v = inputs((3, 4, 2, length, length, 16), dtype)
    got = partial_attention(q, k, v, scale=0.25, causal=True, impl=impl)
    check(got, expected(q, k, v, 0.25, np.tri(length, dtype=bool)), dtype)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_key_mask_with_a_row_that_sees_nothing(dtype, impl):
    q, k, v = inputs((4, 4, 2, 5, 33, 16), dtype)
    mask = torch.from_numpy(np.random.default_rng(0).random((4, 33)) < 0.5)
    mask[2] = False
    got = partial_attention(q, k, v, scale=0.25, key_mask=mask, impl=impl)
    check(got, expected(q, k, v, 0.25, mask.numpy()[:, None, None, :]), dtype)
    assert got[1][2].eq(-torch.inf).all()
    assert got[0][2].eq(0).all()


@pytest.mark.parametrize("softcap", [None, 0.6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "dtype"),
    [
        *((rows, keys, dtype) for rows, keys in ((1, 1), (63, 63)) for dtype in DTYPES),
        *((rows, keys, torch.float32) for rows, keys in ((600, 111), (300, 600))),
        *slow(*((*sizes, dtype) for sizes in ((600, 111), (300, 600)) for dtype in HALVES)),
    ],
    ids=str,
)
def test_first_keys_and_soft_cap(rows, keys, causal, softcap, dtype):
    """The windows' lower edge moves in both directions, also beyond the last key."""
    keys = rows if causal else keys
    q, k, v = inputs((2, 2, 1, rows, keys, 16), dtype)
    first = torch.arange(rows) - 5 if causal else torch.arange(rows).flip(0) * keys // rows + 3
    key = np.arange(keys)
    visible = key >= first.numpy()[:, None]
    visible &= key <= np.arange(rows)[:, None] if causal else np.True_
    references = expected(q, k, v, 0.3, visible, softcap)
    blind = torch.from_numpy(~visible.any(axis=1))
    for impl in IMPLEMENTATIONS:
        got = partial_attention(
            q, k, v, scale=0.3, causal=causal, first_key=first, softcap=softcap, impl=impl
        )
        check(got, references, dtype)
        assert got[1][:, :, blind].eq(-torch.inf).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_soft_cap_with_and_without_a_key_mask(shape, impl):
    q, k, v = inputs(shape, torch.float32)
    got = partial_attention(q, k, v, scale=0.3, softcap=0.4, impl=impl)
    check(got, expected(q, k, v, 0.3, np.True_, 0.4), torch.float32)
    mask = torch.from_numpy(np.random.default_rng(0).random((shape[0], shape[4])) < 0.5)
    got = partial_attention(q, k, v, scale=0.3, softcap=0.4, key_mask=mask, impl=impl)
    check(got, expected(q, k, v, 0.3, mask.numpy()[:, None, None, :], 0.4), torch.float32)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 2, 1, 0, 7, 8), (1, 2, 1, 7, 0, 8), (0, 2, 1, 7, 7, 8)])
def test_empty_passes(shape, impl):
    """No rows, no keys or no batch: the operator below would crash the process."""
    q, k, v = inputs(shape, torch.float32)
    out, lse = partial_attention(q, k, v, scale=1.0, impl=impl)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_of_two_halves_is_the_whole(dtype):
    q, k, v = inputs((2, 4, 2, 20, 111, 16), dtype)
    whole = expected(q, k, v, 0.25, np.True_)
    halves = [
        partial_attention(q, k[:, :, part], v[:, :, part], scale=0.25, impl="reference")
        for part in (slice(0, 40), slice(40, None))
    ]
    check(merge_partials(*halves[0], *halves[1]), whole, dtype)


def test_merge_with_an_empty_side_changes_nothing():
    q, k, v = inputs((1, 2, 1, 5, 9, 8), torch.float32)
    out, lse = partial_attention(q, k, v, scale=1.0, impl="reference")
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge_partials(out, lse, *nothing), merge_partials(*nothing, out, lse)):
        torch.testing.assert_close(merged, (out, lse), atol=1e-7, rtol=0)
    both = merge_partials(*nothing, *nothing)
    assert both[0].eq(0).all()
    assert both[1].eq(-torch.inf).all()


def test_large_scores_do_not_overflow():
    q, k, v = inputs((1, 1, 1, 3, 5, 8), torch.float32)
    out, lse = partial_attention(q * 1e4, k, v, scale=1.0, impl="cpu")
    assert out.isfinite().all()
    references = expected(q * 1e4, k, v, 1.0, np.True_)
    np.testing.assert_allclose(lse.numpy(), references[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 3, 9, 8), "v": (1, 3, 9, 8)}, "do not fit"),
        ({"v": (1, 2, 8, 8)}, "do not fit"),
        ({"causal": True}, "as many rows as keys"),
        ({"key_mask": torch.ones(1, 8, dtype=torch.bool)}, "key_mask must be"),
        ({"first_key": torch.zeros(4, dtype=torch.int64)}, "first_key must be"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    sizes = {"q": (1, 4, 5, 8), "k": (1, 2, 9, 8), "v": (1, 2, 9, 8)}
    tensors = {name: torch.zeros(change.get(name, size)) for name, size in sizes.items()}
    options = {name: value for name, value in change.items() if name not in sizes}
    with pytest.raises(ValueError, match=message):
        partial_attention(**tensors, scale=1.0, impl="reference", **options)
