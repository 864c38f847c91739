"""The kernels of a forward pass: what the decoder launches for a batch, with its padding.

It follows `gpuscore/backends/torch/decoder.py` for a dense model with a QK norm in bfloat16, with
Triton's kernels. The first norm, which adds nothing, counts as one that adds; the product of the
label head counts as a library's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ceiling import linear_sizes
from gpu_work import Draws, all_batches, first_of
from scenarios import Workload

from cost_model.published import Product, Rowwise
from gpuscore.backends.common.plan import MAX_BATCH_TOKENS
from gpuscore.backends.torch.attention.triton import layout_of
from gpuscore.backends.torch.buckets import Bucket, find_bucket, make_buckets
from gpuscore.backends.torch.plan import GRAPH_TOKENS
from gpuscore.engine.scheduler import Scheduler
from gpuscore.types.batch import PackedBatch
from gpuscore.types.limits import BackendLimits
from gpuscore_kernels.extend_attention import TileShape, TileTable, build_tiles

Shape: TypeAlias = Mapping[str, int]

PAGE = 64  # tokens, as on CUDA
HALF, SINGLE = 2, 4  # bytes of a number
PAGES, MODEL_LEN = 512, 4096  # enough for every workload


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of the list, launched `count` times in a batch."""

    name: str
    work: Product | Rowwise | TileTable
    count: int = 1


def planned(workload: Workload, shape: Shape) -> list[PackedBatch]:
    """Return the batches that the engine makes of a request, with its prefix cached if it is so."""
    scheduler = Scheduler(_limits(shape))
    request = Draws(workload, shape["vocab_size"], seed=0).next()
    if (before := first_of(request, workload)) is not None:
        for work in all_batches(scheduler, before):
            scheduler.succeeded(work)
    return [work.batch for work in all_batches(scheduler, request)]


def _limits(shape: Shape) -> BackendLimits:
    most = MAX_BATCH_TOKENS["cuda"]
    return BackendLimits(most, PAGE, PAGES, MODEL_LEN, vocab_rows=shape["vocab_size"])


def launches(
    batch: PackedBatch, shape: Shape, tile: TileShape, graphs: bool = True
) -> Iterator[Launch]:
    """Yield the kernels of a batch; with `graphs`, small ones have the padding of their graph."""
    layout = layout_of(batch, PAGE)
    table, last = build_tiles(layout, tile), build_tiles(layout, tile, rows=batch.score_rows)
    tokens, scored = batch.num_tokens, len(batch.score_rows)
    if graphs:
        tokens, scored = _padded(batch, table, tile)
    layers = shape["num_hidden_layers"]
    yield from _before(tokens, shape)
    yield from _layers(tokens, layers - 1, shape)
    yield Launch("attention", table, layers - 1)
    yield from _last_layer(tokens, scored, shape)
    yield Launch("attention, last layer", last)
    yield from _head(len(batch.score_rows), len(batch.label_token_ids), shape)


def _padded(batch: PackedBatch, table: TileTable, tile: TileShape) -> tuple[int, int]:
    """Return the rows that are computed, and those of the last layer."""
    wanted = Bucket(batch.num_tokens, len(table.tiles), len(batch.score_rows))
    found = find_bucket(make_buckets(GRAPH_TOKENS["cuda"], tile.rows), wanted)
    return (wanted.tokens, wanted.scored) if found is None else (found.tokens, found.scored)


def _rows(name: str, rows: int, numbers: float, count: int = 1) -> Launch:
    """Return a row-wise kernel that reads and writes so many 16-bit numbers per row."""
    return Launch(name, Rowwise(HALF * rows * numbers), count)


def _before(tokens: int, shape: Shape) -> Iterator[Launch]:
    """Embedding, and the tables of the rotary embedding."""
    yield _rows("embedding", tokens, 2 * shape["hidden_size"])
    numbers = tokens * shape["head_dim"] / 2
    # Angles are written; cosine and sine read them and are written.
    yield Launch("rotary tables", Rowwise(SINGLE * numbers * 5 / 3), count=3)


def _layers(tokens: int, layers: int, shape: Shape) -> Iterator[Launch]:
    """All layers but the last one, without attention."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    yield _rows("add and norm", tokens, 4 * hidden, 2 * layers)
    yield _rows("heads: norm, rotate, store", tokens, _heads(shape, heads), layers)
    yield _rows("gated", tokens, 3 * inner, layers)
    for name, (width, columns) in linear_sizes(shape).items():
        yield Launch(f"product {name}", Product(tokens, columns, width), layers)


def _heads(shape: Shape, heads: int) -> float:
    """16-bit numbers per row of `qk_norm_rope_store`: heads twice, and cos and sin."""
    return 2 * heads * shape["head_dim"] + SINGLE / HALF * shape["head_dim"]


def _last_layer(tokens: int, scored: int, shape: Shape) -> Iterator[Launch]:
    """The last layer without attention: keys of all rows, everything else of scored ones."""
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], 2 * shape["num_key_value_heads"]
    yield _rows("last layer, all rows", tokens, 4 * hidden)
    yield _rows("last layer, all rows", tokens, _heads(shape, kv_heads))
    yield Launch("product keys, last layer", Product(tokens, kv_heads * dim, hidden))
    name = "last layer, scored rows"
    yield _rows(name, scored, 2 * hidden + dim, 4)  # picks rows of four tensors
    yield _rows(name, scored, _heads(shape, heads))
    yield _rows(name, scored, 4 * hidden, 2)
    yield _rows(name, scored, 3 * shape["intermediate_size"])
    sizes = linear_sizes(shape) | {"qkv": (hidden, heads * dim)}
    for width, columns in sizes.values():
        yield Launch("products, last layer", Product(scored, columns, width))


def _head(scored: int, labels: int, shape: Shape) -> Iterator[Launch]:
    """Logits of labels, and the statistics of the vocabulary (a product in Triton)."""
    hidden = shape["hidden_size"]
    yield _rows("label logits", labels, 2 * hidden)
    yield Launch("label head", Product(scored, shape["vocab_size"], hidden))
    yield Launch("label head, merge", Rowwise(SINGLE * scored * 4))
