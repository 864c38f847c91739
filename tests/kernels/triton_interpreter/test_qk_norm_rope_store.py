"""Promise: from the QKV product to pages and packed keys, the kernel equals the reference in
float64."""

from dataclasses import replace

import pytest
import torch

from gpuscore_kernels import reference
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.reference import QkvHeads
from support.kernels import DEVICE, DTYPES, assert_near, between_nans, randn
from support.slow import slow

SLOTS = 40


def tables(rows, head_dim):
    angles = 3 * randn(rows, head_dim // 2)
    return angles.cos(), angles.sin()


def poisoned_pages(kv_heads, head_dim, dtype, slots, *, by_slot=False):
    """Return both sides [Hkv, slots, D], filled with NaN; with `by_slot` one slot's heads are
    adjacent."""
    shape = (SLOTS, kv_heads, head_dim) if by_slot else (kv_heads, SLOTS, head_dim)
    sides = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    if by_slot:
        sides = [side.transpose(0, 1) for side in sides]
    return Pages(*sides, torch.tensor(slots, device=DEVICE))


@pytest.mark.parametrize("dtype", [DTYPES[0], *slow(*DTYPES[1:])], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "norm"),
    [
        *((5, 4, 2, 16, norm) for norm in ("none", "llama", "gemma")),
        (3, 3, 1, 24, "gemma"),
        (1, 16, 8, 128, "llama"),
        *((2, 0, 2, 16, norm) for norm in ("none", "llama")),
        *((2, 2, 0, 96, norm) for norm in ("none", "gemma")),
        (0, 4, 2, 16, "llama"),
    ],
)
def test_norm_rotation_and_stored_pages(rows, heads, kv_heads, head_dim, norm, dtype):
    qkv = between_nans(randn(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype))
    cos, sin = tables(rows, head_dim)
    weights = [None, None]
    if norm != "none":
        weights = [1 + randn(head_dim, dtype=dtype, seed=s) for s in (1, 2)]
    slots = [31, -1, 0, 7, 39][:rows]
    pages = poisoned_pages(kv_heads, head_dim, dtype, slots, by_slot=rows == 3)
    of_product = QkvHeads(heads, kv_heads, *weights, 1e-4, norm == "gemma")
    got = qk_norm_rope_store(qkv, cos, sin, of_product, pages=pages)
    exact = [None if w is None else w.double() for w in weights]
    wide = (x.double() for x in (qkv, cos, sin))
    of_product = replace(of_product, q_norm=exact[0], k_norm=exact[1])
    expected = reference.norm_and_rotate(*wide, of_product)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == dtype
        assert_near(x, y, dtype)
    assert all(x.is_contiguous() for x in got[:2])
    check_pages(pages, got, slots)


def check_pages(pages, got, slots):
    """Check that kept rows are stored bit for bit and everything else is unchanged."""
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(pages.k[:, slot], got[1][row])
            assert torch.equal(pages.v[:, slot], got[2][row])
            untouched[slot] = False
    for side in (pages.k, pages.v):
        assert side[:, untouched.to(DEVICE)].isnan().all()


@pytest.mark.parametrize("paged", [True, False])
def test_values_that_are_not_finite(paged):
    """They become zeros and their keys NaN, but not in rows that are not kept."""
    heads, kv_heads, dim, slots = 3, 3, 24, [5, -1, 2]
    qkv, angles = randn(3, (heads + 2 * kv_heads) * dim), tables(3, dim)
    sizes = QkvHeads(heads, kv_heads)
    q, k, v = (x.clone() for x in reference.norm_and_rotate(qkv, *angles, sizes))
    raw = qkv.view(3, -1, dim)[:, heads + kv_heads :]
    raw[0, 0, 3], raw[1, 1, 23], raw[2, 2, 0] = torch.inf, torch.nan, -torch.inf
    pages = poisoned_pages(kv_heads, dim, torch.float32, slots) if paged else None
    for row, head in ((0, 0), (2, 2)) if paged else ((0, 0), (1, 1), (2, 2)):
        k[row, head], v[row, head] = torch.nan, 0
    if paged:
        v[1, 1, 23] = torch.nan
    got = qk_norm_rope_store(qkv, *angles, sizes, pages)
    for x, y in zip(got, (q, k, v), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
    if pages is not None:
        for side, wanted in ((pages.k, k), (pages.v, v)):
            stored = side[:, [5, 2]].transpose(0, 1)
            torch.testing.assert_close(stored, wanted[[0, 2]], equal_nan=True)


@pytest.mark.parametrize("slots", [[], [7, 39, 0, *[-1] * 13, 39, *[-1] * 15]])
def test_cached_rows_follow_the_batchs(slots):
    """Zeros where there is no slot; and values of all rows are finite, of those not kept too."""
    rows, kv_heads, head_dim = 3, 3, 24
    qkv, angles = randn(rows, 4 * kv_heads * head_dim), tables(rows, head_dim)
    heads = QkvHeads(2 * kv_heads, kv_heads)
    _, *expected = (x.clone() for x in reference.norm_and_rotate(qkv, *angles, heads))
    qkv.view(rows, -1, head_dim)[1, -1, 3] = torch.inf
    for side, marked in zip(expected, (torch.nan, 0), strict=True):
        side[1, -1] = marked
    pages = poisoned_pages(kv_heads, head_dim, torch.float32, [5, -1, 2])
    for side in (pages.k, pages.v):
        side[:, [7, 39, 0]] = randn(kv_heads, 3, head_dim)
    cached = [side[:, slots].transpose(0, 1).clone() for side in (pages.k, pages.v)]
    for side in cached:
        side[[slot < 0 for slot in slots]] = 0
    pages = replace(pages, read=torch.tensor(slots, dtype=torch.int32, device=DEVICE))
    _, *got = qk_norm_rope_store(qkv, *angles, heads, pages)
    for side, own, behind in zip(got, expected, cached, strict=True):
        torch.testing.assert_close(side, torch.cat([own, behind]), equal_nan=True)
    assert got[1].isfinite().all()


def test_values_stay_where_they_are():
    qkv = randn(2, 6 * 16, dtype=torch.float16)
    v = qk_norm_rope_store(qkv, *tables(2, 16), QkvHeads(2, 2))[2]
    assert torch.equal(v.flatten(1), qkv[:, 4 * 16 :])
    assert v.data_ptr() == qkv[:, 4 * 16 :].data_ptr()


def test_norm_and_rotation_round_once():
    """Both together give nearly always the bits of float64 rounded once."""
    qkv, norms = randn(9, 4 * 64, dtype=torch.float16), [randn(64, seed=s).half() for s in (1, 2)]
    for one_plus in (False, True):
        angles = tables(9, 64)
        got = qk_norm_rope_store(qkv, *angles, QkvHeads(2, 1, *norms, 1e-4, one_plus))
        wide, exact = ([x.double() for x in group] for group in ((qkv, *angles), norms))
        expected = reference.norm_and_rotate(*wide, QkvHeads(2, 1, *exact, 1e-4, one_plus))
        for value, exact in zip(got, expected, strict=True):
            assert (value == exact.half()).float().mean() > 0.99
