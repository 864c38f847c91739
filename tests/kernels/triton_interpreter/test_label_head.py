"""Promise: the label head equals float64, with slices, tiles and rows that do not divide evenly."""

import importlib

import pytest
import torch

from gpuscore_kernels.label_head import label_logits, vocab_statistics
from support.kernels import DEVICE, DTYPES, INTERPRETED, assert_near, between_nans, planted, randn
from support.slow import slow

# Tokens that give each slice several tiles: 4 slices and tiles of 32 tokens in the interpreter, 128
# slices and tiles of 64 on a card.
TILE, MANY = (32, 199) if INTERPRETED else (64, 20011)


def make(rows, vocab, width, dtype, softcap=None):
    hidden, weight = randn(rows, width, dtype=dtype), randn(vocab, width, dtype=dtype, seed=3)
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return between_nans(hidden), weight, logits


# 17 rows of 129 tokens give a second block of rows, slices of two tiles and an empty slice.
@pytest.mark.parametrize(
    ("softcap", "dtype"),
    [(None, torch.float32), *slow(*((20.0, dtype) for dtype in DTYPES))],
)
@pytest.mark.parametrize(
    ("rows", "vocab", "width"),
    [(1, 1, 1), (3, 63, 17), (17, 129, 32), *([] if INTERPRETED else [(70, MANY, 32)])],
)
def test_statistics(rows, vocab, width, softcap, dtype):
    hidden, weight, logits = make(rows, vocab, width, dtype, softcap)
    lse, top, top_logits = vocab_statistics(
        hidden, weight, need_top=True, softcap=softcap, impl="triton"
    )
    assert lse.dtype == torch.float32, "logits stay float32 whatever the weights are"
    assert_near(lse, torch.logsumexp(logits, dim=1), torch.float32)
    assert top.dtype == torch.int64
    assert torch.equal(top, logits.argmax(dim=1))
    assert top_logits.dtype == torch.float32
    assert_near(top_logits, logits.max(dim=1).values, torch.float32)
    again, *none = vocab_statistics(hidden, weight, need_top=False, softcap=softcap, impl="triton")
    assert torch.equal(lse, again)
    assert none == [None, None]


def test_chosen_rows_and_their_bits():
    """A row's statistics depend neither on the other rows nor on its place."""
    hidden, weight, _ = make(20, 70, 20, torch.float32)
    every = vocab_statistics(hidden, weight, need_top=True, impl="triton")
    rows = torch.tensor([19, 0, 19, 7], device=DEVICE)
    some = vocab_statistics(hidden, weight, rows, need_top=True, impl="triton")
    assert all(torch.equal(a[rows], b) for a, b in zip(every, some, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("width", [1, 17, 1111])
def test_label_logits_are_ragged(width, softcap, dtype):
    hidden, weight, logits = make(5, 63, width, dtype, softcap)
    touched = [62, 0, 62, 5, 7, 7, 31]
    poisoned = torch.full_like(weight, torch.nan)  # only the labels' rows are read
    poisoned[touched] = weight[touched]
    rows, labels = torch.tensor([[0, 0, 0, 2, 4, 4, 1], touched], device=DEVICE)
    got = label_logits(hidden, poisoned, rows, labels, softcap=softcap, impl="triton")
    assert got.dtype == torch.float32
    assert_near(got, logits[rows, labels], torch.float32)
    assert got[0] == got[2]


def test_a_tie_goes_to_the_lowest_id():
    """Ties lie within a tile, across tiles, and across slices."""
    weight = torch.zeros(MANY, 2, device=DEVICE)
    for tied in ([7, 9], [20, 20 + TILE], [70, MANY - 1]):
        weight.zero_()
        weight[tied] = 1.0
        hidden = torch.ones(2, 2, device=DEVICE)
        assert vocab_statistics(hidden, weight, need_top=True, impl="triton")[1].eq(tied[0]).all()


def test_large_logits_do_not_overflow():
    hidden, weight, logits = make(3, 90, 32, torch.float32)
    lse, *_ = vocab_statistics(hidden * 1e4, weight, need_top=False, impl="triton")
    assert_near(lse, torch.logsumexp(logits * 1e4, dim=1), torch.float32)


def test_what_is_not_finite_stays_so_in_its_row():
    hidden, weight, _ = make(3, 90, 32, torch.float32)
    hidden = hidden.clone()
    hidden[1, 5] = torch.nan
    lse, *_ = vocab_statistics(hidden, weight, need_top=False, impl="triton")
    assert lse.isfinite().tolist() == [True, False, True]


def test_nothing_wanted():
    weight, none = randn(9, 4), torch.empty(0, 4, device=DEVICE)
    no_rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert label_logits(none, weight, no_rows, no_rows, impl="triton").shape == (0,)
    every = vocab_statistics(none, weight, need_top=True, impl="triton")
    assert all(x.shape == (0,) for x in every)
    lse, *_ = vocab_statistics(randn(3, 4), weight, no_rows, need_top=False, impl="triton")
    assert lse.shape == (0,)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('tl.where(is_token[None, :], logits, float("-inf"))', "logits"),
        ("total * tl.exp(peak - new_peak)", "total"),
        ("* tl.exp(peak - highest)", ""),
        ("first + per_slice, tiles", "first + per_slice - 1, tiles"),
        ("logits = _capped(logits, softcap)", "logits = logits"),
        ("tl.where(logits < 0, -size, size)", "size"),
        ("best = tl.where(tile_peak > peak", "best = tl.where(tile_peak < peak"),
        ("top_logits + row, highest", "top_logits + row, total"),
        ("if not EVEN_K:", "if False:"),
    ],
)
def test_a_defect_is_visible(old, new, monkeypatch, tmp_path):
    module = importlib.import_module("gpuscore_kernels.label_head.triton")
    with planted(monkeypatch, module, old, new, tmp_path), pytest.raises(AssertionError):
        check_few_and_many_tokens()


def check_few_and_many_tokens():
    """Few, among which the padding of a tile counts, and more than a tile of each slice."""
    for tokens in (199, MANY):
        test_statistics(5, tokens, 23, 20.0, torch.float32)


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("tile_peak > peak", "tile_peak >= peak", test_a_tie_goes_to_the_lowest_id),
        (
            "mask=is_row, other=0).to(tl.int64)",
            "mask=is_row, other=0).to(tl.int64) * 0",
            test_chosen_rows_and_their_bits,
        ),
        (
            "tl.load(label_ids + label)",
            "tl.load(label_ids)",
            lambda: test_label_logits_are_ragged(17, None, torch.float32),
        ),
    ],
)
def test_a_defect_elsewhere_is_visible(old, new, check, monkeypatch, tmp_path):
    module = importlib.import_module("gpuscore_kernels.label_head.triton")
    with planted(monkeypatch, module, old, new, tmp_path), pytest.raises(AssertionError):
        check()
