"""Proof at start that an attention backend computes what the reference does, on this machine.

Kernels of libraries and compilers for GPUs differ between versions and cards; a wrong mask or a
misread stride would change scores without an error.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.torch.attention import TorchAttention
from gpuscore.backends.torch.attention_backends import Factory
from gpuscore.backends.torch.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.errors import ConfigError
from gpuscore.types import PackedBatch
from gpuscore_kernels.partial_attention import merge_partials

# Norm of the error over that of the answer; what a correct kernel does is several times smaller.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}

# Requests: cached tokens, tokens of the query beside its items, lengths of the items.
REQUESTS = ((70, 0, (1, 9)), (0, 37, (3, 20)), (64, 6, (5,)))


def check_known_answer(
    name: str,
    factory: Factory,
    model: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
) -> None:
    """Raises ConfigError where the backend's answer is not the reference's.

    Args:
        name: of the backend, for people.
        factory: makes it.
        model: one layer of each window is computed, and the last.
        dtype, device, page_size: of the pool.
    """
    windows = (*dict.fromkeys(model.windows), model.windows[-1])
    config = replace(model, num_layers=len(windows), windows=windows)
    batch = _batch(page_size)
    pools = [
        KVPool(config, batch.page_table.size, page_size, kind, device)
        for kind in (dtype, torch.float32)
    ]
    with torch.inference_mode():
        tested = factory(config, pools[0]).plan(batch)
        exact = TorchAttention(config, pools[1], "reference", merge_partials).plan(batch)
        generator = torch.Generator().manual_seed(0)
        for layer in range(config.num_layers):
            for side in zip(*(pool.layers[layer] for pool in pools), strict=True):
                _fill(side, generator)
            q, k, v = (
                torch.randn(batch.num_tokens, heads, config.head_dim, generator=generator)
                .to(dtype)
                .to(device)
                for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            )
            if layer == config.num_layers - 1:
                q = q[torch.from_numpy(batch.score_rows.astype(np.int64)).to(device)]
            got = tested.run(layer, q, k, v)
            want = exact.run(layer, q.float(), k.float(), v.float())
            _compare(name, got, want, TOLERANCE[dtype])


def _fill(sides: tuple[Tensor, Tensor], generator: torch.Generator) -> None:
    """The same random numbers, as the first one's format holds them, in two pools."""
    first, second = sides
    first.copy_(torch.randn(first.shape, generator=generator))
    second.copy_(first)


def _compare(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    error = float((got.float() - want).norm() / want.norm())
    if not error <= tolerance:
        raise ConfigError(
            f"--attention {name} computes something else than the reference on this machine: "
            f"the relative error of a known answer is {error:.1e}, allowed {tolerance:.0e}; "
            "choose another --attention"
        )


def _batch(page_size: int) -> PackedBatch:
    """All of `REQUESTS`; every segment's last row is scored, and the last query is kept."""
    int32 = np.int32
    lengths: list[int] = []
    starts: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    for request, (cached, query, items) in enumerate(REQUESTS):
        parent = len(lengths) if query else -1
        if query:
            lengths.append(query)
            starts.append(cached)
            parents.append(-1)
        lengths += items
        starts += [cached + query] * len(items)
        parents += [parent] * len(items)
        owners += [request] * (len(items) + bool(query))
    ends = np.cumsum(lengths)
    room = max(-(-(cached + query) // page_size) for cached, query, _ in REQUESTS)
    pages = np.arange(len(REQUESTS) * room)[::-1].reshape(len(REQUESTS), room)
    slots = np.full(ends[-1], -1, int32)
    cached, query, _ = REQUESTS[-1]
    kept = cached + np.arange(query)
    first = ends[-1] - lengths[-1] - query
    slots[first : first + query] = pages[-1, kept // page_size] * page_size + kept % page_size
    count = len(lengths)
    return PackedBatch(
        token_ids=np.zeros(ends[-1], int32),
        positions=np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
        ).astype(int32),
        cu_seqlens=np.concatenate(([0], ends)).astype(int32),
        parent=np.array(parents, int32),
        request_of=np.array(owners, int32),
        prefix_lens=np.array([cached for cached, _, _ in REQUESTS], int32),
        page_table=pages.astype(int32),
        slot_mapping=slots,
        score_rows=(ends - 1).astype(int32),
        cu_labels=np.arange(count + 1, dtype=int32),
        label_token_ids=np.zeros(count, int32),
        need_lse=np.zeros(count, bool),
        need_top=False,
    )
