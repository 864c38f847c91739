"""Promise: the label head equals NumPy float64, with tiles far smaller than the vocabulary."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuscore_kernels import label_head
from support.kernels import between_nans
from support.memory import most_in_use

label_logits = partial(label_head.label_logits, impl="reference")
vocab_statistics = partial(label_head.vocab_statistics, impl="reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_pieces(monkeypatch):
    """Convert 4 rows of 17 weights at a time."""
    monkeypatch.setattr(label_head, "CACHED_PIECE", 4 * 17)


@pytest.fixture
def new_memory_is_nan():
    """Fill new tensors with NaN, so that a number that nothing wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, 3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make(rows, vocab, width, dtype):
    generator = torch.Generator().manual_seed(rows * vocab)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    return hidden, weight, hidden.double().numpy() @ weight.double().numpy().T


@pytest.mark.usefixtures("small_pieces", "new_memory_is_nan")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "max_tile"),
    [
        *((r, v, tile) for r, v in ((1, 1), (3, 63), (111, 5)) for tile in (1, 100, 1 << 22)),
        *((63, 257, tile) for tile in (100, 1 << 22)),  # tiles of 1 would take seconds
    ],
)
@pytest.mark.parametrize("num_top", [1, 2, label_head.MAX_TOP])
def test_statistics(rows, vocab, max_tile, dtype, num_top, monkeypatch):
    monkeypatch.setattr(label_head, "MAX_TILE", max_tile)
    hidden, weight, logits = make(rows, vocab, 17, dtype)
    lse, top, top_logits = vocab_statistics(hidden, weight, num_top=num_top)
    peak = logits.max(axis=1, keepdims=True)
    expected = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
    assert lse.dtype == torch.float32, "logits stay float32 whatever the weights are"
    np.testing.assert_allclose(lse.numpy(), expected, atol=1e-5, rtol=2e-6)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    count = min(num_top, vocab)
    np.testing.assert_array_equal(top.numpy()[:, :count], order)
    assert top_logits.dtype == torch.float32
    best = np.take_along_axis(logits, order, axis=1)
    np.testing.assert_allclose(top_logits.numpy()[:, :count], best, atol=1e-5, rtol=2e-6)
    assert (top_logits[:, count:] == -torch.inf).all(), "there are no more tokens"
    again, *none = vocab_statistics(hidden, weight, num_top=0, impl="reference")
    assert torch.equal(lse, again)
    assert none == [None, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_tile", [1, 100, 1 << 22])
def test_label_logits_are_ragged_and_repeatable(max_tile, dtype, monkeypatch):
    monkeypatch.setattr(label_head, "MAX_TILE", max_tile)
    hidden, weight, logits = make(5, 63, 17, dtype)
    rows = torch.tensor([0, 0, 0, 2, 4, 4, 1])
    labels = torch.tensor([62, 0, 62, 5, 7, 7, 31])
    got = label_logits(hidden, weight, rows, labels).numpy()
    np.testing.assert_allclose(got, logits[rows, labels], atol=1e-5)
    assert got[0] == got[2]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tie_goes_to_the_lowest_id(dtype, monkeypatch):
    hidden, weight = torch.ones(1, 17, dtype=dtype), torch.zeros(40, 17, dtype=dtype)
    weight[[3, 4, 22, 39]] = 1  # ends of a piece, and other tiles
    for max_tile in (1, 17, 17 * 20, 10_000):
        monkeypatch.setattr(label_head, "MAX_TILE", max_tile)
        assert vocab_statistics(hidden, weight, num_top=1)[1] == 3
        for num_top in (2, 4, 6):
            top = vocab_statistics(hidden, weight, num_top=num_top)[1]
            assert top[0].tolist() == [3, 4, 22, 39, 0, 1][:num_top]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("max_tile", [1, 17 * 20, 10_000])
def test_ties_of_more_tokens_than_are_wanted(max_tile, monkeypatch):
    monkeypatch.setattr(label_head, "MAX_TILE", max_tile)
    rng = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 5, (300, 1), generator=rng).float()
    hidden = torch.tensor([[1.0], [0.0], [-1.0]])
    statistics = vocab_statistics(hidden, weight, num_top=label_head.MAX_TOP)
    expected = (hidden @ weight.T).sort(dim=1, descending=True, stable=True)
    assert torch.equal(statistics.top_ids, expected.indices[:, : label_head.MAX_TOP])
    assert torch.equal(statistics.top_logits, expected.values[:, : label_head.MAX_TOP])


@pytest.mark.usefixtures("small_pieces", "new_memory_is_nan")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap(dtype):
    hidden, weight, logits = make(3, 63, 17, dtype)
    lse, _, top_logits = vocab_statistics(hidden, weight, num_top=1, softcap=5.0)
    capped = 5 * np.tanh(logits / 5)
    np.testing.assert_allclose(lse.numpy(), np.log(np.exp(capped).sum(axis=1)), atol=1e-5)
    np.testing.assert_allclose(top_logits[:, 0].numpy(), capped.max(axis=1), atol=1e-5)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype):
    """Rows and weights lie between NaN, and rows are also read column by column."""
    hidden, weight, _ = make(3, 63, 17, dtype)
    expected = vocab_statistics(hidden, weight, num_top=1)
    for rows in (between_nans(hidden), hidden.T.contiguous().T):
        got = vocab_statistics(rows, between_nans(weight), num_top=1)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_top", [1, 5])
@pytest.mark.parametrize("rows", [9, 64, 65, 128])
def test_packed_as_alone(rows, dtype, num_top):
    """Other rows change no more than the order of sums.

    With as many rows, the bits are the same wherever a row stands: `--deterministic` needs that.
    """
    hidden, weight, _ = make(rows, 3000, 64, dtype)
    packed = vocab_statistics(hidden, weight, num_top=num_top)
    for row in (0, rows // 2, rows - 1):
        alone = vocab_statistics(hidden[row : row + 1], weight, num_top=num_top)
        torch.testing.assert_close(alone.lse, packed.lse[row : row + 1], rtol=0, atol=1e-5)
        tops = packed.top_logits[row : row + 1]
        torch.testing.assert_close(alone.top_logits, tops, rtol=2e-6, atol=1e-5)
        apart = alone.top_logits.diff(dim=1).abs().min() > 1e-4 if num_top > 1 else True
        if apart:
            assert torch.equal(alone.top_ids, packed.top_ids[row : row + 1])
    if rows % 32 == 0:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        turned = vocab_statistics(hidden[order], weight, num_top=num_top)
        assert all(torch.equal(a, b[order]) for a, b in zip(turned, packed, strict=True))


class Largest(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that an operator made."""

    def __init__(self, known):
        super().__init__()
        self.known, self.size = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple) else (made,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != self.known:
                self.size = max(self.size, x.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pieces_that_a_cache_holds_are_converted(dtype):
    """All weights would take 20 MB in float32, and a tile of them 16 MB."""
    hidden, weight, _ = make(3, 20_000, 256, dtype)
    with Largest(weight) as largest:
        vocab_statistics(hidden, weight, num_top=1)
    assert 0 < largest.size <= 4 * label_head.CACHED_PIECE


def test_chosen_rows():
    hidden, weight, _ = make(9, 63, 17, torch.float32)
    rows = torch.tensor([8, 0, 8])
    chosen = vocab_statistics(hidden, weight, rows, num_top=1)
    alone = vocab_statistics(hidden[rows], weight, num_top=1)
    assert all(torch.equal(a, b) for a, b in zip(chosen, alone, strict=True))


def test_too_many_best_tokens_are_refused():
    hidden, weight = torch.zeros(2, 4), torch.zeros(9, 4)
    with pytest.raises(ValueError, match="21 top tokens, the limit is 20"):
        vocab_statistics(hidden, weight, num_top=21)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(dtype):
    empty, weight = torch.empty(0, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    nothing = torch.empty(0, dtype=torch.int64)
    assert label_logits(empty, weight, nothing, nothing).shape == (0,)
    assert vocab_statistics(empty, weight, num_top=1)[0].shape == (0,)


@pytest.mark.parametrize("rows", [100, 300])
def test_the_first_rows_of_a_head_take_as_much_memory_as_all(rows):
    """Count what the allocator gives out; bench/LOG.md says what fragments take."""
    width = 256
    weight = torch.ones(8 * label_head.MAX_TILE // width, width, dtype=torch.bfloat16)
    first = weight[: label_head.repeating_rows(width)]
    assert len(first) < len(weight) / 2
    hidden = torch.ones(rows, width, dtype=torch.bfloat16)
    part, whole = (
        most_in_use(partial(vocab_statistics, hidden, some, num_top=1)) for some in (first, weight)
    )
    assert whole == part > 4 * label_head.MAX_TILE
