"""Promise: the label head equals NumPy float64, with tiles far smaller than the vocabulary."""

from functools import partial

import numpy as np
import pytest
import torch

from gpuscore_kernels import label_head

label_logits = partial(label_head.label_logits, impl="reference")
vocab_statistics = partial(label_head.vocab_statistics, impl="reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(rows, vocab, width, dtype):
    generator = torch.Generator().manual_seed(rows * vocab)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    return hidden, weight, hidden.double().numpy() @ weight.double().numpy().T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "max_tile"),
    [
        *((r, v, tile) for r, v in ((1, 1), (3, 63), (111, 5)) for tile in (1, 100, 1 << 22)),
        *((63, 257, tile) for tile in (100, 1 << 22)),  # tiles of 1 would take seconds
    ],
)
def test_statistics(rows, vocab, max_tile, dtype):
    hidden, weight, logits = make(rows, vocab, 17, dtype)
    lse, top, top_logits = vocab_statistics(hidden, weight, need_top=True, max_tile=max_tile)
    peak = logits.max(axis=1, keepdims=True)
    want = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
    assert lse.dtype == torch.float32, "logits stay float32 whatever the weights are"
    np.testing.assert_allclose(lse.numpy(), want, atol=1e-5, rtol=2e-6)
    np.testing.assert_array_equal(top.numpy(), logits.argmax(axis=1))
    assert top_logits.dtype == torch.float32
    np.testing.assert_allclose(top_logits.numpy(), logits.max(axis=1), atol=1e-5, rtol=2e-6)
    again, *none = vocab_statistics(
        hidden, weight, need_top=False, max_tile=max_tile, impl="reference"
    )
    assert torch.equal(lse, again)
    assert none == [None, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_tile", [1, 100, 1 << 22])
def test_label_logits_are_ragged_and_repeatable(max_tile, dtype):
    hidden, weight, logits = make(5, 63, 17, dtype)
    rows = torch.tensor([0, 0, 0, 2, 4, 4, 1])
    labels = torch.tensor([62, 0, 62, 5, 7, 7, 31])
    got = label_logits(hidden, weight, rows, labels, max_tile=max_tile).numpy()
    np.testing.assert_allclose(got, logits[rows, labels], atol=1e-5)
    assert got[0] == got[2]


def test_a_tie_goes_to_the_lowest_id():
    hidden, weight = torch.ones(1, 2), torch.tensor([[0.0, 1], [1, 1], [1, 1], [0, 0]])
    for max_tile in (1, 4, 100):
        assert vocab_statistics(hidden, weight, need_top=True, max_tile=max_tile)[1] == 1


def test_chosen_rows():
    hidden, weight, _ = make(9, 63, 17, torch.float32)
    rows = torch.tensor([8, 0, 8])
    chosen = vocab_statistics(hidden, weight, rows, need_top=True)
    alone = vocab_statistics(hidden[rows], weight, need_top=True)
    assert all(torch.equal(a, b) for a, b in zip(chosen, alone, strict=True))


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight = torch.zeros(2, 4), torch.zeros(9, 4)
    with pytest.raises(ValueError, match="do not fit"):
        vocab_statistics(hidden, weight[:, :3], need_top=False)
    with pytest.raises(ValueError, match="do not fit"):
        vocab_statistics(hidden.half(), weight, need_top=False)
    with pytest.raises(ValueError, match="rows for"):
        label_logits(hidden, weight, torch.zeros(2).long(), torch.zeros(3).long())


def test_no_rows():
    empty, weight = torch.empty(0, 4), torch.ones(3, 4)
    nothing = torch.empty(0, dtype=torch.int64)
    assert label_logits(empty, weight, nothing, nothing).shape == (0,)
    assert vocab_statistics(empty, weight, need_top=True)[0].shape == (0,)
