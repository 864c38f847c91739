"""Promise: on a Hopper GPU `--attention fa4` follows the mask rule, also from a CUDA graph whose
batch has changed, and values that are not finite reach no other row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore.backends.torch.attention import fa4
from gpuscore.backends.torch.attention.choice import choose_attention
from gpuscore.backends.torch.buckets import Bucket
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.rounding import TOLERANCE, relative_error
from gpuscore.errors import ConfigError
from gpuscore.types.batch import Prefix, Segment, pack, prefix_slots, visible_rows
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from support.attention_inputs import heads_alone, requests
from support.batches import Pages as BatchPages
from support.batches import item_segments, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, SLOTS = 64, 64 * 256
BFLOAT16 = torch.bfloat16


class Setup:
    """A pool with random contents, and the backend over it."""

    def __init__(self, head_dim, group, kv_heads=2):
        self.config = heads_alone(group * kv_heads, kv_heads, head_dim)
        self.device = torch.device("cuda")
        try:
            choose_attention("fa4", self.config, self.device, BFLOAT16, False)
        except ConfigError as error:
            pytest.skip(str(error))
        self.pool = KVPool(self.config, SLOTS // PAGE, PAGE, BFLOAT16, self.device)
        torch.manual_seed(head_dim + group)
        for side in (side for layer in self.pool.layers for side in layer):
            side.normal_()
        self.attention = fa4.HopperAttention(self.config, self.pool)

    def qkv(self, tokens):
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        columns = heads * self.config.head_dim
        return torch.randn(tokens, columns, dtype=BFLOAT16, device=self.device)

    def sides(self, qkv, read, slots=None):
        """Return q, k and v as a layer makes them, without rotation."""
        config, tokens = self.config, len(qkv)
        angles = torch.zeros(tokens, config.head_dim // 2, device=self.device)
        kept = torch.full((tokens,), -1, dtype=torch.int32, device=self.device)
        kept = kept if slots is None else slots
        heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
        pages = Pages(*self.pool.layers[0], kept, read)
        cos, sin = angles.cos(), angles.sin()
        return qk_norm_rope_store(qkv, cos, sin, **heads, pages=pages, impl="triton")

    def expected(self, batch, qkv, rows):
        """Compute rows by the rule, in float64."""
        config, tokens = self.config, batch.num_tokens
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = qkv[:tokens].double().view(tokens, -1, config.head_dim).split(heads, 1)
        seen = [torch.from_numpy(visible_rows(batch)[rows])]
        request = batch.request_of.repeat(np.diff(batch.cu_seqlens))[rows]
        sides = [[k], [v]]
        for number in range(len(batch.prefix_lens)):
            slots = prefix_slots(batch, number, PAGE)
            for side, pool in zip(sides, self.pool.layers[0], strict=True):
                side.append(pool[:, slots].double().transpose(0, 1))
            own = torch.from_numpy(request == number)
            seen.append(own[:, None].expand(-1, len(slots)))
        k, v = (torch.cat(x).repeat_interleave(heads[0] // heads[1], 1) for x in sides)
        visible = torch.cat(seen, 1).to(self.device)
        scores = torch.einsum("mhd,thd->hmt", q[rows], k) * config.attention_scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hmt,thd->mhd", weights, v.where(v.isfinite(), 0.0))

    def check(self, batch):
        """Compare all rows of a layer, and the scored rows of the last."""
        made, qkv = self.attention.prepare(batch), self.qkv(batch.num_tokens)
        q, k, v = self.sides(qkv, made.read)
        assert len(k) == len(v) == batch.num_tokens + len(made.read)
        for layer, rows in ((0, np.arange(batch.num_tokens)), (1, batch.score_rows)):
            expected = self.expected(batch, qkv, rows)
            near(made.run(layer, q[rows].contiguous(), k, v), expected)


def near(got, expected):
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 3e-2, "of the worst row"
    assert relative_error(got, expected.float()) <= TOLERANCE[BFLOAT16]


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_by_the_rule(head_dim, group):
    """Trees of several requests with cached prefixes, chunks, and items without a query."""
    setup = Setup(head_dim, group)
    for seed in range(6):
        setup.check(random_batch(np.random.default_rng(seed), SLOTS, PAGE))
    for sizes in (
        ((0, 700, [20] * 30),),
        ((1000, 0, [5] * 130),),
        ((130, 70, []), (64, 0, [200, 3]), (128, 129, [1, 64]), (0, 0, [1])),
        ((0, 1, [1]),),
    ):
        setup.check(requests(*sizes, page_size=PAGE, num_pages=SLOTS // PAGE))


def test_eight_kv_heads_and_a_large_request():
    setup = Setup(128, 2, kv_heads=8)
    pages = BatchPages.shuffled(np.random.default_rng(1), SLOTS // PAGE, PAGE)
    query = np.zeros(900, np.int32)
    items = item_segments([[1] * 20] * 100, 900, 0, 0, [1])
    setup.check(pack([Segment(query, 0, 0), *items], [Prefix(0, pages.of(0, 0))]))


def test_a_graph_whose_batch_changes():
    """One capture serves batches of other lengths, lists included."""
    setup = Setup(128, 2)
    sizes = Bucket(700, 4, 60)
    places = setup.attention.places(sizes, 0)
    words = torch.zeros(places[0].end, dtype=torch.int32, device=setup.device)
    qkv = setup.qkv(sizes.tokens)
    chosen = torch.zeros(sizes.scored, dtype=torch.int64, device=setup.device)

    def run():
        made = setup.attention.on_device(places, words)
        q, k, v = setup.sides(qkv, made.read)
        return made.run(0, q, k, v), made.run(1, q[chosen], k, v)

    def fill(batch):
        host = np.empty(places[0].end, np.int32)
        places[0].write(setup.attention.tables(batch)[0], host, len(host))
        words.copy_(torch.from_numpy(host))
        rows = np.zeros(sizes.scored, np.int64)
        rows[: len(batch.score_rows)] = batch.score_rows
        chosen.copy_(torch.from_numpy(rows))
        qkv.normal_()

    batches = [
        requests(*each, page_size=PAGE, num_pages=SLOTS // PAGE)
        for each in (
            ((0, 300, [20] * 9),),
            ((200, 40, [5] * 8), (130, 0, [33, 1])),
            ((0, 0, [7]), (500, 100, [11] * 40), (1, 1, [1])),
        )
    ]
    fill(batches[0])
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole, last = run()
    for batch in batches:
        fill(batch)
        whole.fill_(torch.nan)
        graph.replay()
        near(whole[: batch.num_tokens], setup.expected(batch, qkv, np.arange(batch.num_tokens)))
        count = len(batch.score_rows)
        near(last[:count], setup.expected(batch, qkv, batch.score_rows))
        assert (whole[batch.num_tokens :] == 0).all(), "rows of padding see nothing"


def test_what_is_not_finite_reaches_those_who_see_it_only():
    setup = Setup(128, 2)
    batch = requests((70, 30, [20] * 9), (0, 50, [9]), page_size=PAGE, num_pages=SLOTS // PAGE)
    qkv, made = setup.qkv(batch.num_tokens), setup.attention.prepare(batch)
    poisoned = 95  # in an item of the first request
    qkv.view(batch.num_tokens, -1, 128)[poisoned, -1, 3] = torch.inf
    got = made.run(0, *setup.sides(qkv, made.read))
    seen = visible_rows(batch)[:, poisoned]
    assert got[seen].isnan().any(-1).any(-1).all()
    rows = np.flatnonzero(~seen)
    near(got[rows], setup.expected(batch, qkv, rows))


def test_on_another_stream():
    setup = Setup(64, 4)
    batch = random_batch(np.random.default_rng(3), SLOTS, PAGE)
    batch = replace(batch, score_rows=batch.score_rows[:1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # what were launched on the first stream would be too early
        setup.check(batch)
