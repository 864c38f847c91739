"""Promise: every batch within the bound has a CUDA graph that is little larger, and a choice that
cannot run graphs is refused."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gpuscore.backends import plan_backend
from gpuscore.backends.torch.attention.tiled import layout_of, table_places
from gpuscore.backends.torch.batch_words import Places
from gpuscore.backends.torch.buckets import FEW, Bucket, filled_batch, find_bucket, make_buckets
from gpuscore.backends.torch.graph_launcher import GRAPH_WORDS
from gpuscore.backends.torch.plan import GRAPH_TOKENS
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore_kernels.extend_attention.table import TileShape, list_words
from gpuscore_kernels.extend_attention.tiles import TableBuilder
from support.slow import slow

MOST = 4096


@pytest.fixture(scope="module")
def buckets():
    return make_buckets(MOST, 32)  # two heads per KV head on an H100


@pytest.mark.parametrize("most", [1, 12, 32, 33, 47, 100, 4000, 4096])
@pytest.mark.parametrize("rows_per_tile", [1, 18, 64, 128])
def test_every_batch_has_one(most, rows_per_tile):
    buckets = make_buckets(most, rows_per_tile)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == Bucket(most, most, most)
    rng = np.random.default_rng(most)
    for tokens in {1, most, *rng.integers(1, most + 1, 50).tolist()}:
        tiles, scored = rng.integers(0, tokens + 1, 2).tolist()
        bucket = find_bucket(buckets, Bucket(tokens, tiles, scored))
        assert bucket is not None
        assert bucket.tokens >= tokens
        assert bucket.tiles >= tiles
        assert bucket.scored >= scored
        assert not any(
            b.tokens < bucket.tokens and b.tokens >= tokens and b.tiles >= tiles
            for b in buckets
            if b.scored >= scored
        ), "there is a smaller one"


@pytest.mark.parametrize("rows_per_tile", [1, 4, 18, 32, 64, 128])
def test_there_are_few(rows_per_tile):
    """Counts the buckets at the default of --cuda-graph-tokens, which a server captures at
    start."""
    assert len(make_buckets(GRAPH_TOKENS["cuda"], rows_per_tile)) <= 200


def test_the_page_has_the_numbers(buckets):
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "cuda-runner.md").read_text()
    page = " ".join(page.split())
    assert f"{len(buckets)} buckets for 4,096 tokens and two heads per KV head" in page
    sizes = np.array(sorted({bucket.tokens for bucket in buckets}))
    for first, last in ((128, 512), (512, MOST)):
        tokens = np.arange(first, last + 1)
        padding = 1 - tokens / sizes[np.searchsorted(sizes, tokens)]
        worst, mean = 100 * padding.max(), 100 * padding.mean()
        said = (
            f"{first:,} to {last:,} tokens at most {worst:.0f} % of a bucket's tokens are padding"
        )
        assert f"{said}, {mean:.0f} % on average" in page


@pytest.mark.parametrize("most", [MOST, 512, *slow(300, 500)])
def test_small_batches_have_little_padding(most):
    """Checks the worst of all sizes from 128 tokens on, whatever else the batch has."""
    buckets = make_buckets(most, 32)
    worst = {True: 0.0, False: 0.0}
    for tokens in [*range(128, min(most, 513)), *range(513, most + 1, 7)]:
        for tiles, scored in ((1, 1), (FEW + 1, 1), (1, FEW + 1), (tokens, 1), (tokens, tokens)):
            bucket = find_bucket(buckets, Bucket(tokens, tiles, scored))
            assert bucket is not None
            worst[tokens > 512] = max(worst[tokens > 512], 1 - tokens / bucket.tokens)
    assert worst[False] <= 0.12
    assert worst[True] <= 0.08


def test_few_requests_do_not_get_the_room_of_many(buckets):
    """Each request has a query and an item: tiles that it shares with no other, and a scored
    row."""
    for tokens in sorted({bucket.tokens for bucket in buckets if bucket.tokens >= 2 * FEW}):
        for count in range(1, FEW + 1):
            wanted = Bucket(tokens, -(-tokens // 32) + 2 * count, count)
            bucket = find_bucket(buckets, wanted)
            assert bucket is not None
            assert bucket.scored == FEW
            assert bucket.tiles <= max(FEW, 4 * wanted.tiles)


def test_batches_over_the_largest_bucket_have_none(buckets):
    assert find_bucket(buckets, Bucket(MOST + 1, 1, 1)) is None
    assert make_buckets(0, 64) == []
    assert find_bucket([], Bucket(1, 1, 1)) is None


@pytest.mark.parametrize(
    ("most", "rows_per_tile"), [(1, 64), (12, 1), (300, 18), (4096, 64), *slow((4096, 128))]
)
def test_the_known_batch_of_each_bucket_fills_it(most, rows_per_tile):
    shape = TileShape(rows_per_tile, 64, 32)
    for bucket in make_buckets(most, rows_per_tile):
        batch = filled_batch(bucket.tokens, bucket.scored, 100_000, 64)
        layout = layout_of(batch, 64)
        whole, last = TableBuilder(layout, shape).tables([None, batch.score_rows])
        assert batch.num_tokens == bucket.tokens
        assert 1 <= len(batch.score_rows) <= bucket.scored
        assert 1 <= len(whole.tiles) <= bucket.tiles
        assert 1 <= len(last.tiles) <= bucket.scored
        words = Places.of(bucket, partial(table_places, 2)).end + list_words([whole, last])
        assert words <= GRAPH_WORDS
        assert (np.diff(batch.cu_seqlens)[1:] > 0).all()
        assert len(set(batch.token_ids.tolist())) > bucket.tokens // 4, "alike, all would be equal"


@pytest.mark.parametrize("sizes", [Bucket(1, 0, 0), Bucket(17, 5, 3), Bucket(4096, 200, 4096)])
def test_places_do_not_overlap(sizes):
    places = Places.of(sizes, partial(table_places, 3))
    parts = [*places.arrays.slices, *(slice(table.start, table.end) for table in places.tables)]
    sizes_of_arrays = [part.stop - part.start for part in parts[:5]]
    assert sizes_of_arrays == [sizes.tokens] * 3 + [sizes.scored, 2]
    used = np.zeros(places.end, int)
    for part in parts:
        used[part] += 1
    assert used.max() == 1
    assert all(part.start % 16 == 0 for part in parts)  # in int32 words: kernels want it


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "--attention is torch, --kernels torch; both have to be triton"),
        ({"attention": "triton"}, "--attention is triton, --kernels torch"),
        ({"attention": "triton", "kernels": "triton", "deterministic": True}, "--deterministic"),
    ],
)
def test_a_choice_that_cannot_run(tiny_model, monkeypatch, options, reason):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # only to get past the choice; nothing is computed
    directory, _ = tiny_model("qwen3")
    config = ModelConfig(str(directory), dtype="float32", cuda_graph_tokens=64, **options)
    with pytest.raises(ConfigError, match=f"^--cuda-graph-tokens 64: .*{reason}"):
        plan_backend(directory, config)


def test_never_larger_than_a_batch(tiny_model, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    directory, _ = tiny_model("qwen3")
    chosen = {"dtype": "float32", "attention": "triton", "kernels": "triton"}
    for wanted, most in ((64, 64), (4096, 100), (0, 0), (None, 0)):
        config = ModelConfig(
            str(directory), cuda_graph_tokens=wanted, max_batch_tokens=100, **chosen
        )
        assert plan_backend(directory, config).graph_tokens == most
