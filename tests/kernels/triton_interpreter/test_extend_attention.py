"""Promise: `extend_attention` equals the mask rule in NumPy and float64, without a tile table.

They run in the interpreter, or on a GPU if there is one.
"""

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention.tiled import layout_of
from gpuscore.types.batch import Prefix, Segment, pack
from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import upload
from gpuscore_kernels.extend_attention.tiles import TableBuilder
from gpuscore_kernels.extend_attention.triton import extend_attention
from support import attention_oracle as oracle
from support.attention_inputs import inputs, relative_error, requests
from support.batches import Pages, int32
from support.kernels import DEVICE, DTYPES, INTERPRETED, TOLERANCE
from support.slow import slow

PAGE, PAGES = 32, 16
HEADS = (2, 1)  # of queries, of keys
CONFIG = TileConfig(block_m=32, block_n=32, masked_n=16, num_warps=4, num_stages=1)

BATCHES = {
    "a single token": [(0, 0, [1])],
    "one key in a page": [(1, 0, [1, 2])],
    "prefix ends with a page": [(64, 0, [3])],
    "prefix ends in a page": [(45, 0, [1, 5, 20, 33])],
    "parent beside its items": [(0, 37, [3, 17, 1])],
}
MIXED = [(33, 34, [2, 20]), (0, 0, [9]), (64, 5, [3, 5]), (5, 0, [20])]
SMALL = [(32, 33, [3, 5]), (5, 0, [2])]
TREE = "a tree"
FEW = np.arange(30, 43, dtype=np.int32)  # rows: the query's last one, and all of the items


def table_of(batch, config, heads, window=None, rows=None):
    builder = TableBuilder(layout_of(batch, PAGE), config.shape(heads[0] // heads[1]))
    return upload(builder.tables([rows], window), torch.device(DEVICE))[0]


def error(
    sizes,
    *,
    dtype=torch.float32,
    dim=16,
    heads=HEADS,
    config=CONFIG,
    window=None,
    softcap=None,
    rows=None,
    scale=0.3,
):
    """Return the relative error."""
    batch = tree() if sizes == TREE else requests(*sizes, page_size=PAGE, num_pages=PAGES)
    operands = inputs(batch, PAGE, PAGES, heads, dim=dim, dtype=dtype, device=DEVICE)
    tiles = table_of(batch, config, heads, window=window, rows=rows)
    q = operands.q if rows is None else operands.q[torch.from_numpy(rows).long()]
    options = {"scale": scale, "softcap": softcap, "config": config}
    _, k, v, *pool = operands.all()
    out = extend_attention((q, k, v), pool, tiles, **options)
    exact, k, v, *pools = (x.double().cpu().numpy() for x in operands.all())
    exact *= scale * dim**0.5
    by_slot = (x.swapaxes(0, 1) for x in pools)
    expected = oracle.attention(batch, PAGE, exact, k, v, *by_slot, window, softcap)
    return relative_error(out.cpu(), torch.from_numpy(expected[... if rows is None else rows]))


def close(error, dtype=torch.float32):
    assert error <= TOLERANCE[dtype]


def tree():
    """Return a root of 9 tokens with items of 5 and 20, below which others continue."""
    segments, starts = [], [33]
    for length, parent in ((9, -1), (5, 0), (3, 1), (2, 2), (1, 1), (20, 0), (17, 5)):
        start = 33 if parent < 0 else starts[parent] + len(segments[parent].token_ids)
        starts[len(segments) :] = [start]
        segments.append(
            Segment(int32(range(length)), start, 0, parent=parent, label_ids=int32([1]))
        )
    pages = Pages.shuffled(np.random.default_rng(0), PAGES, PAGE)
    return pack(segments, [Prefix(33, pages.of(0, 33))])


@pytest.mark.parametrize("window", [None, *slow(9)])
def test_trees(window):
    close(error(TREE, window=window))


@pytest.mark.parametrize("name", BATCHES)
def test_layouts(name):
    close(error(BATCHES[name]))


@pytest.mark.parametrize("dim", [96, 256] if INTERPRETED else [64, 96, 128, 256])
def test_head_sizes(dim):
    close(error(SMALL, dim=dim, rows=FEW))


@pytest.mark.parametrize(
    "heads", [(4, 2), *(pytest.param(heads, marks=pytest.mark.slow) for heads in ((1, 1), (3, 1)))]
)
def test_heads_that_share_keys(heads):
    close(error(SMALL, heads=heads, rows=FEW))


@pytest.mark.parametrize(("window", "softcap"), [(16, 1.5), *slow((1, None), (40, None))])
def test_windows_and_soft_caps(window, softcap):
    close(error(MIXED, window=window, softcap=softcap))


def test_a_soft_cap_alone():
    close(error(SMALL, softcap=0.7))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_short_numbers(dtype):
    close(error(SMALL, dtype=dtype, dim=64), dtype)
    close(error(SMALL, dtype=dtype, window=20, softcap=1.5), dtype)


def test_scored_rows_only():
    close(error(MIXED, rows=np.array([97, 3, 66, 34, 76], np.int32)))
    close(error(MIXED, rows=np.array([0], np.int32)))


def test_no_rows():
    batch = requests(*MIXED, page_size=PAGE, num_pages=PAGES)
    operands = inputs(batch, PAGE, PAGES, HEADS, dim=16, dtype=torch.float32, device=DEVICE)
    tiles = table_of(batch, CONFIG, HEADS, rows=np.empty(0, np.int32))
    _, k, v, *pool = operands.all()
    out = extend_attention((operands.q[:0], k, v), pool, tiles, scale=1.0, config=CONFIG)
    assert out.shape == (0, 2, 16)


def test_large_scores_do_not_overflow():
    assert error(SMALL, scale=1e4) < 0.01, "no more than scores of 1e4 let differ"


@pytest.mark.parametrize("window", [24, *slow(None)])
def test_neighbours_change_no_bit(window):
    """An item alone, in a crowd, beside its query or on its cached query."""
    config = CONFIG.steady()
    layouts = [
        ((0, 64, [21]), 0),
        ((32, 32, [1, 21]), 1),
        ((64, 0, [21, 9]), 0),
        ((0, 64, [5, 30, 21, 2]), 2),
    ]
    bits = [item_bits(config, window, *layout) for layout in layouts[: 2 if window else 4]]
    assert all(np.array_equal(bits[0], other) for other in bits[1:])
    if window is None:  # show that the test can fail: narrower masked tiles do depend on neighbours
        query = [item_bits(CONFIG, None, (cached, 96 - cached, [21]), 0) for cached in (0, 45)]
        assert not np.array_equal(*query)


def item_bits(config, window, request, item):
    """Return the output bits of one item's rows; a sequence has the same tokens in every layout."""
    cached, query, items = request
    batch = requests(request, page_size=PAGE, num_pages=PAGES)
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randn(2, cached + query, 1, 16, generator=generator)
    own = torch.randn(3, 21, 2, 16, generator=generator)
    operands = inputs(batch, PAGE, PAGES, HEADS, dim=16, dtype=torch.float32)
    slots = [batch.page_table[0, i // PAGE] * PAGE + i % PAGE for i in range(cached)]
    for side, pool in enumerate((operands.pool_k, operands.pool_v)):
        pool[:, slots] = prefix[side, :cached].transpose(0, 1)
    start = query + sum(items[:item])
    for side, rows in enumerate((operands.k, operands.v)):
        rows[:query] = prefix[side, cached:]
        rows[start : start + 21] = own[side, :, :1]
    operands.q[start : start + 21] = own[2]
    tiles = table_of(batch, config, HEADS, window=window)
    moved = [x.to(DEVICE) for x in operands.all()]
    out = extend_attention(moved[:3], moved[3:], tiles, scale=0.3, config=config)
    return out[start : start + 21].cpu().numpy()
