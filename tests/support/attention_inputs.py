"""Inputs for the attention kernels: a batch's layout, and keys and values in poisoned memory."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.ropes import Rope
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack
from support.batches import Pages, int32, item_segments


def heads_alone(heads: int, kv_heads: int, dim: int) -> DecoderConfig:
    """Return the part of a configuration that attention reads: two layers without a window."""
    return DecoderConfig(
        architecture="",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-6,
        rope=Rope(1e4),
        max_position_embeddings=1,
        windows=(None, None),
        attention_scale=dim**-0.5,
        tie_word_embeddings=True,
        checkpoint_dtype="float32",
    )


def requests(*sizes: tuple[int, int, list[int]], page_size: int, num_pages: int) -> PackedBatch:
    """Return a batch of requests, each (cached tokens, query tokens in the batch, item lengths)."""
    pages = Pages.shuffled(np.random.default_rng(0), num_pages, page_size)
    segments, prefixes = [], []
    for request, (cached, query, items) in enumerate(sizes):
        parent = len(segments) if query else -1
        if query:
            segments.append(Segment(int32(range(query)), cached, request))
        tokens = [list(range(n)) for n in items]
        segments += item_segments(tokens, cached + query, request, parent, [1])
        prefixes.append(Prefix(cached, pages.of(request, cached, room=num_pages // len(sizes))))
    return pack(segments, prefixes)


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor
    pool_k: Tensor  # [Hkv, slots, D], NaN in every slot that no row sees
    pool_v: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.pool_k, self.pool_v


def inputs(
    batch: PackedBatch,
    page_size: int,
    num_pages: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Inputs:
    """Return random inputs; k and v lie in one tensor, as a projection leaves them."""
    generator = torch.Generator().manual_seed(7)
    slots = num_pages * page_size
    cached = [
        batch.page_table[request, i // page_size] * page_size + i % page_size
        for request, length in enumerate(batch.prefix_lens)
        for i in range(length)
    ]
    total = batch.num_tokens
    q = torch.randn(total, heads[0], dim, generator=generator)
    kv = torch.randn(total, 2 * heads[1], dim, generator=generator).to(dtype).to(device)
    pools = []
    for _ in range(2):
        values = torch.randn(heads[1], slots, dim, generator=generator)
        pool = torch.full_like(values, torch.nan)
        pool[:, cached] = values[:, cached]
        pools.append(pool.to(dtype).to(device))
    k, v = kv.chunk(2, dim=1)
    return Inputs(q.to(dtype).to(device), k, v, *pools)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`; NaN if any number is NaN."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
