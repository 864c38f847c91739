"""Promise: the label head equals float64, with slices, tiles and rows that do not divide evenly."""

import importlib

import pytest
import torch

from gpuscore_kernels.label_head import MAX_TOP, label_logits, vocab_statistics
from support.kernels import DEVICE, DTYPES, INTERPRETED, assert_near, between_nans, randn
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
@pytest.mark.parametrize("num_top", [1, 2, MAX_TOP])
def test_statistics(rows, vocab, width, softcap, dtype, num_top):
    hidden, weight, logits = make(rows, vocab, width, dtype, softcap=softcap)
    lse, top, top_logits = vocab_statistics(
        hidden, weight, num_top=min(num_top, vocab), softcap=softcap, impl="triton"
    )
    assert lse.dtype == torch.float32, "logits stay float32 whatever the weights are"
    assert_near(lse, torch.logsumexp(logits, dim=1), torch.float32)
    assert top.dtype == torch.int64
    expected = logits.topk(min(num_top, vocab), dim=1)
    assert torch.equal(top, expected.indices)
    assert top_logits.dtype == torch.float32
    assert_near(top_logits, expected.values, torch.float32)
    again, *none = vocab_statistics(hidden, weight, num_top=0, softcap=softcap, impl="triton")
    assert torch.equal(lse, again)
    assert none == [None, None]


def test_chosen_rows_and_their_bits():
    """A row's statistics depend neither on the other rows nor on its place."""
    hidden, weight, _ = make(20, 70, 20, torch.float32)
    every = vocab_statistics(hidden, weight, num_top=1, impl="triton")
    rows = torch.tensor([19, 0, 19, 7], device=DEVICE)
    some = vocab_statistics(hidden, weight, rows, num_top=1, impl="triton")
    assert all(torch.equal(a[rows], b) for a, b in zip(every, some, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("width", [1, 17, 1111])
def test_label_logits_are_ragged(width, softcap, dtype):
    hidden, weight, logits = make(5, 63, width, dtype, softcap=softcap)
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
        for num_top, expected in ((1, tied[:1]), (4, [*tied, 0, 1])):
            top_ids = vocab_statistics(hidden, weight, num_top=num_top, impl="triton")[1]
            assert top_ids.tolist() == [expected, expected]


def test_ties_of_more_tokens_than_are_wanted():
    """All tokens but one are equal, and equal ones come in every order of ids."""
    weight = torch.zeros(300, 2, device=DEVICE)
    weight[171] = 1.0
    hidden = torch.ones(1, 2, device=DEVICE)
    statistics = vocab_statistics(hidden, weight, num_top=MAX_TOP, impl="triton")
    assert statistics.top_ids[0].tolist() == [171, *range(MAX_TOP - 1)]
    rng = torch.Generator().manual_seed(0)
    weight[:, 0] = torch.randint(0, 9, (300,), generator=rng).to(weight)
    weight[:, 1] = 0
    statistics = vocab_statistics(hidden, weight, num_top=MAX_TOP, impl="triton")
    expected = weight[:, 0].sort(descending=True, stable=True)
    assert statistics.top_ids[0].tolist() == expected.indices[:MAX_TOP].tolist()
    assert statistics.top_logits[0].tolist() == expected.values[:MAX_TOP].tolist()


def test_rows_are_computed_in_parts_if_many_tokens_are_wanted(monkeypatch):
    module = importlib.import_module("gpuscore_kernels.label_head.triton")
    hidden, weight, _ = make(7, 70, 20, torch.float32)
    rows = torch.tensor([6, 0, 6, 3], device=DEVICE)
    for chosen in (None, rows):
        every = vocab_statistics(hidden, weight, chosen, num_top=5, impl="triton")
        with monkeypatch.context() as patch:
            patch.setattr(module, "BEST_ROWS", 3)
            parts = vocab_statistics(hidden, weight, chosen, num_top=5, impl="triton")
        assert torch.equal(parts.top_ids, every.top_ids)
        assert_near(parts.lse, every.lse, torch.float32)
        assert_near(parts.top_logits, every.top_logits, torch.float32)


def test_large_logits_do_not_overflow():
    hidden, weight, logits = make(3, 90, 32, torch.float32)
    lse, *_ = vocab_statistics(hidden * 1e4, weight, num_top=0, impl="triton")
    assert_near(lse, torch.logsumexp(logits * 1e4, dim=1), torch.float32)


def test_what_is_not_finite_stays_so_in_its_row():
    hidden, weight, _ = make(3, 90, 32, torch.float32)
    hidden = hidden.clone()
    hidden[1, 5] = torch.nan
    lse, *_ = vocab_statistics(hidden, weight, num_top=0, impl="triton")
    assert lse.isfinite().tolist() == [True, False, True]


def test_nothing_wanted():
    weight, none = randn(9, 4), torch.empty(0, 4, device=DEVICE)
    no_rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert label_logits(none, weight, no_rows, no_rows, impl="triton").shape == (0,)
    every = vocab_statistics(none, weight, num_top=1, impl="triton")
    assert [tuple(x.shape) for x in every] == [(0,), (0, 1), (0, 1)]
    lse, *_ = vocab_statistics(randn(3, 4), weight, no_rows, num_top=0, impl="triton")
    assert lse.shape == (0,)
