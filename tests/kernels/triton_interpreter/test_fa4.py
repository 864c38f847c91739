"""Promise: with `--attention fa4` rows see what the mask rule says, in batches of any kind, also in
a CUDA graph whose batch has changed, and values that are not finite reach no other row.

On a card the compiled kernel runs. In the interpreter one stands in, which computes in float64 by
the numbers and lists alone.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention import fa4
from gpuscore.backends.torch.attention.choice import choose_attention
from gpuscore.backends.torch.buckets import Bucket
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.layers import norm_and_rotate
from gpuscore.backends.torch.queues import queue_of
from gpuscore.errors import ConfigError
from gpuscore.types.batch import prefix_slots, visible_rows
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.reference import QkvHeads
from support.attention_inputs import heads_alone, requests
from support.batches import random_batch
from support.fa4_stand_in import kernel
from support.kernels import DEVICE, INTERPRETED, in_triton
from support.poison import check_neighbours, poisoned
from support.slow import slow

PAGE, NUM_PAGES = 16, 256
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
WORST = 1e-5 if INTERPRETED else 3e-2  # error of a row


def by_torch(qkv, cos, sin, heads, pages):
    """Return what `qk_norm_rope_store` does, which takes long in the interpreter."""
    q, *sides = norm_and_rotate(qkv, cos, sin, heads)
    flawed = ~sides[1].isfinite().all(-1, keepdim=True)
    for side, marked in zip(sides, (torch.nan, 0.0), strict=True):
        side.masked_fill_(flawed, marked)
    read, rows = pages.read[:, None, None], []
    for own, pool in zip(sides, (pages.k, pages.v), strict=True):
        cached = pool[:, pages.read.clamp(min=0)].transpose(0, 1).where(read >= 0, 0.0)
        rows.append(torch.cat([own, cached.where(read != fa4.UNUSED, torch.nan)]))
    return q, *rows


class Layer:
    """Attention over a pool with random contents, with places for batches up to some sizes."""

    def __init__(self, group, head_dim=8 if INTERPRETED else 128, tokens=700, blocks=9, scored=700):
        self.device, self.group = torch.device(DEVICE), group
        self.config = heads_alone(2 * group, 2, head_dim)
        try:
            if not INTERPRETED:
                choose_attention("fa4", self.config, self.device, DTYPE, deterministic=False)
        except ConfigError as error:
            pytest.skip(str(error))
        self.pool = KVPool(self.config, NUM_PAGES, PAGE, DTYPE, device=self.device)
        names = fa4.HopperAttention.__init__.__globals__
        with mock.patch.dict(names, {"load": lambda *sizes: kernel} if INTERPRETED else {}):
            self.attention = fa4.HopperAttention(self.config, self.pool)
        self.place(Bucket(tokens, blocks, scored))
        torch.manual_seed(group)
        for side in self.pool.layers[0]:
            side.normal_()

    def place(self, sizes):
        self.sizes, self.places = sizes, self.attention.places(sizes, 16)
        self.words = torch.full((self.places[0].end,), -77, dtype=torch.int32, device=self.device)
        heads = (2 + self.group) * 2 * self.config.head_dim
        self.qkv = torch.randn(sizes.tokens, heads, dtype=DTYPE, device=self.device)
        self.scored = torch.zeros(sizes.scored, dtype=torch.int64, device=self.device)

    def fill(self, batch):
        """Write a batch to its places, as a launcher does."""
        (table,) = self.attention.tables(batch)
        words = np.full(self.places[0].end + 3, -77, np.int32)
        self.places[0].write(table, words, 0)
        assert (words[:16] == -77).all()
        assert (words[-3:] == -77).all()
        self.words.copy_(torch.from_numpy(words[:-3]))
        scored = np.zeros(self.sizes.scored, np.int64)
        scored[: len(batch.score_rows)] = batch.score_rows
        self.scored.copy_(torch.from_numpy(scored))
        self.qkv.normal_()

    def run(self):
        """Return the rows of a layer and those of the last layer."""
        made = self.attention.on_device(self.places, self.words)
        tokens, config = len(self.qkv), self.config
        heads = QkvHeads(config.num_heads, config.num_kv_heads)
        angle = torch.zeros(tokens, config.head_dim // 2, device=self.device)
        kept = torch.full((tokens,), -1, dtype=torch.int32, device=self.device)
        pages = Pages(*self.pool.layers[0], kept, made.read)
        project = by_torch if INTERPRETED else qk_norm_rope_store
        q, k, v = project(self.qkv, angle.cos(), angle.sin(), heads, pages=pages)
        return made.run(0, q.contiguous(), k, v), made.run(1, q[self.scored], k, v)

    def check(self, batch, got, rows):
        """Compare rows with the rule, in float64; rows of padding see nothing."""
        heads = [2 * self.group, 2, 2]
        q, *sides = (
            self.qkv.double().view(self.sizes.tokens, -1, self.config.head_dim).split(heads, 1)
        )
        seen = [torch.from_numpy(visible_rows(batch)[rows])]
        request = batch.request_of.repeat(np.diff(batch.cu_seqlens))[rows]
        k, v = ([side[: batch.num_tokens]] for side in sides)
        for number in range(len(batch.prefix_lens)):
            slots = prefix_slots(batch, number, PAGE)
            for side, pool in zip((k, v), self.pool.layers[0], strict=True):
                side.append(pool[:, slots].double().transpose(0, 1))
            seen.append(torch.from_numpy(request == number)[:, None].expand(-1, len(slots)))
        k, v = (torch.cat(x).repeat_interleave(self.group, 1) for x in (k, v))
        scores = torch.einsum("mhd,thd->hmt", q[rows], k) * self.config.attention_scale
        visible = torch.cat(seen, 1).to(self.device)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        expected = torch.einsum("hmt,thd->mhd", weights, v.where(v.isfinite(), 0.0))
        error = (got[: len(rows)].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert (error < WORST).all(), error.max()
        assert (got[len(rows) :] == 0).all()

    def checked(self, batch):
        self.fill(batch)
        whole, last = self.run()
        self.check(batch, whole, np.arange(batch.num_tokens))
        self.check(batch, last, batch.score_rows)


SIZES = (
    ((0, 300, [20] * 9),),
    ((300, 0, [5] * 40),),
    ((1, 1, [1]), (0, 0, [1])),
    ((130, 70, []), (16, 0, [200, 3]), (128, 129, [1, 64])),
    ((1000, 40, [5] * 8), (130, 0, [33, 1])),
)


def batches():
    yield from (requests(*each, page_size=PAGE, num_pages=NUM_PAGES) for each in SIZES)
    for seed in range(6):
        batch = random_batch(np.random.default_rng(seed), NUM_PAGES * PAGE, PAGE)
        if batch.num_tokens <= 700:
            yield batch


# The compiled kernel knows a head's size; numbers and lists, which its stand-in takes, do not.
@pytest.mark.parametrize("head_dim", [8] if INTERPRETED else [64, 128])
@pytest.mark.parametrize("group", [1, 8] if INTERPRETED else [1, 2, 4, 8])
def test_attention_by_the_rule(group, head_dim):
    """Trees of several requests, chunks, cached prefixes; padded to a graph's sizes and exact."""
    layer = Layer(group, head_dim)
    for batch in batches():
        layer.checked(batch)
    blocks = layer.attention.tiles(layer.attention.tables(batch))
    layer.place(Bucket(batch.num_tokens, blocks, len(batch.score_rows)))
    layer.checked(batch)


def test_a_graph_whose_batch_changes():
    layer, first = Layer(2), next(batches())
    layer.fill(first)
    whole, last = (torch.empty_like(x) for x in layer.run())

    def run():
        for kept, fresh in zip((whole, last), layer.run(), strict=True):
            kept.copy_(fresh)

    replay = queue_of(layer.device).capture(run)
    for batch in batches():
        layer.fill(batch)
        replay()
        layer.check(batch, whole, np.arange(batch.num_tokens))
        layer.check(batch, last, batch.score_rows)


def test_neighbours_in_one_prefix_share_its_copy():
    one = requests((40, 0, [3]), (40, 0, [5, 2]), page_size=PAGE, num_pages=NUM_PAGES)
    same = one.page_table[[0, 0]]
    for pages, request, cached in (
        (one.page_table, [0, 1, 1], 80),
        (same, [0, 1, 1], 40),
        (one.page_table, [0, 1, 0], 120),  # a request in two places
    ):
        batch = replace(one, page_table=pages, request_of=np.array(request, np.int32))
        slots, *_ = fa4.key_table(batch, PAGE)
        assert (slots >= 0).sum() == cached
        Layer(2).checked(batch)


def test_what_is_not_finite_reaches_those_who_see_it_only():
    layer, batch = Layer(2), next(batches())
    layer.fill(batch)
    poison = 305  # in an item
    layer.qkv[poison, -3] = torch.inf
    whole, _ = layer.run()
    sees = visible_rows(batch)[:, poison]
    assert whole[: batch.num_tokens][sees].isnan().any(-1).any(-1).all()
    assert whole[: batch.num_tokens][~sees].isfinite().all()


def test_a_block_that_all_rows_see_needs_no_rule():
    """Compare the numbers of blocks with those that the rule itself makes full."""
    layer = Layer(2, tokens=700, blocks=0)
    batch = requests((0, 500, [20] * 10), page_size=PAGE, num_pages=NUM_PAGES)
    layer.fill(batch)
    made, rule = layer.attention.on_device(layer.places, layer.words), visible_rows(batch)
    some_count, _, full_count, _ = made.rules[0][1]
    parts = [[rule[i : i + 64, j : j + 128] for j in range(0, 700, 128)] for i in range(0, 700, 64)]
    whole = [sum(part.shape[1] == 128 and part.all() for part in of_tile) for of_tile in parts]
    some = [sum(part.any() for part in of_tile) for of_tile in parts]
    np.testing.assert_array_equal(full_count.cpu(), whole)
    np.testing.assert_array_equal(some_count.cpu(), np.subtract(some, whole))


@pytest.mark.skipif(not INTERPRETED, reason="a small model's heads are too small")
@pytest.mark.parametrize("kind", ["v", *slow("k", "kv")])
@pytest.mark.usefixtures("fa4_stands_in", "quick_start")
def test_neighbours_of_a_poisoned_request(kind, tiny_model, tmp_path):
    directory = poisoned(tiny_model("qwen3", num_hidden_layers=1)[0], tmp_path / "model", kind)
    small = {"max_batch_tokens": 256, "max_model_len": 128}
    check_neighbours(in_triton(directory, attention="fa4", **small))
