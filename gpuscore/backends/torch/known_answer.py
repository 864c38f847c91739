"""A check at start that attention and kernels agree with their references on this machine.

GPU kernels of libraries and compilers differ between versions and cards. A wrong mask or a misread
stride would change scores without an error.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.known_batch import REQUESTS, known_batch, request_mask
from gpuscore.backends.torch.attention.choice import Factory
from gpuscore.backends.torch.decoder import DecoderWeights
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.errors import ConfigError
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack, prefix_slots
from gpuscore_kernels.add_rms_norm import add_rms_norm
from gpuscore_kernels.gated import gated
from gpuscore_kernels.label_head import MAX_TOP, label_logits, vocab_statistics
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.qk_norm_rope_store.api import Implementation

# Largest norm of the error over the norm of the answer; a correct kernel stays several times lower.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}

Run: TypeAlias = Callable[[Implementation], tuple[Tensor, ...]]

ROWS = 33  # rows of the inputs of kernels

# Before the others for FlashInfer, which skips tiles of keys that items cannot reach: so many items
# without a prefix that its tiles, on Hopper of up to 192 rows and 96 keys, have some to skip.
MANY_ITEMS = ((0, 0, (60,) * 6),)


def check_known_answer(
    name: str,
    factory: Factory,
    model: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
) -> None:
    """Raise ConfigError if the attention backend's answer differs from the mask rule's.

    Args:
        name: of the backend, for the error.
        factory: makes it.
        model: its configuration; one layer of each window is computed, and the last.
        dtype, device, page_size: of the pool.
    """
    windows = (*dict.fromkeys(model.windows), model.windows[-1])
    config = replace(model, num_layers=len(windows), windows=windows)
    batch = known_batch(page_size, MANY_ITEMS + REQUESTS if name == "flashinfer" else REQUESTS)
    pools = [
        KVPool(config, batch.page_table.size, page_size, kind, device)
        for kind in (dtype, torch.float32)
    ]
    with torch.inference_mode():
        tested = factory(config, pools[0]).prepare(batch)
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
            want = _by_the_rule(config, layer, batch, pools[1], q.float(), k.float(), v.float())
            if layer == config.num_layers - 1:
                scored = torch.from_numpy(batch.score_rows.astype(np.int64)).to(device)
                q, want = q[scored], want[scored]
            got = tested.run(layer, q, k, v)
            compare(f"--attention {name}", "", got, want, TOLERANCE[dtype])


def _by_the_rule(
    config: DecoderConfig, layer: int, batch: PackedBatch, pool: KVPool, *rows: Tensor
) -> Tensor:
    """Compute attention with an explicit mask: all rows of one layer, request by request.

    Args:
        rows: q [T, H, D], k and v [T, Hkv, D], float32.

    Returns:
        [T, H, D].
    """
    q, k, v = (side.transpose(0, 1) for side in rows)  # [heads, T, D]
    request_of = batch.request_of[
        np.repeat(np.arange(len(batch.parent)), np.diff(batch.cu_seqlens))
    ]
    out, group = torch.empty_like(q), config.num_heads // config.num_kv_heads
    for request in range(len(batch.prefix_lens)):
        own = np.flatnonzero(request_of == request)
        slots = prefix_slots(batch, request, pool.page_size)
        keys, values = (
            torch.cat((cached[:, slots], new[:, own]), dim=1).repeat_interleave(group, dim=0)
            for cached, new in zip(pool.layers[layer], (k, v), strict=True)
        )
        scores = q[:, own] @ keys.transpose(1, 2) * config.attention_scale
        if config.attention_softcap is not None:
            scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        mask = torch.from_numpy(request_mask(batch, own, len(slots), config.windows[layer])).to(
            q.device
        )
        out[:, own] = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ values
    return out.transpose(0, 1)


def check_kernels(
    model: DecoderConfig,
    weights: DecoderWeights,
    pdl: bool = False,
    others: Iterable[tuple[str, Run]] = (),
) -> None:
    """Raise ConfigError if a kernel of `--kernels triton` differs from its reference.

    Args:
        model, weights: norms of the first layer and the label head are taken from them; rows are
            random.
        pdl: kernels begin before the kernel before has ended.
        others: names and calls of kernels to check beside them.
    """
    with torch.inference_mode():
        for name, run in chain(_kernel_calls(model, weights, pdl), others):
            # The reference comes first, so that no copy stands before the kernel (see `pdl`).
            for want, got in zip(run("reference"), run("triton"), strict=True):
                compare("--kernels triton", f" in {name}", got, want, TOLERANCE[want.dtype])


def _kernel_calls(
    model: DecoderConfig, weights: DecoderWeights, pdl: bool
) -> Iterator[tuple[str, Run]]:
    """Yield each kernel's name, and a function that calls it or its reference on the same rows."""
    generator, head = torch.Generator().manual_seed(0), weights.lm_head
    eps, one_plus = model.rms_norm_eps, model.one_plus_norms
    layer, heads, kv_heads = weights.layers[0], model.num_heads, model.num_kv_heads

    def rows(columns: int) -> Tensor:
        return torch.randn(ROWS, columns, generator=generator).to(head)

    x, delta, gate_up = rows(model.hidden_size), rows(model.hidden_size), rows(2 * head.shape[1])
    qkv = rows((heads + 2 * kv_heads) * model.head_dim)
    cos, sin = rows(model.head_dim // 2).float(), rows(model.head_dim // 2).float()
    chosen = torch.arange(0, ROWS, 2, device=head.device)
    labels = chosen * 7919 % len(head)

    def with_pages(impl: Implementation) -> tuple[Tensor, ...]:
        k, v = (qkv.new_zeros(kv_heads, 2 * ROWS, model.head_dim) for _ in range(2))
        slots = torch.arange(-2, ROWS - 2, device=head.device) * 2
        heads_of_rows = qk_norm_rope_store(
            qkv,
            cos,
            sin,
            num_heads=heads,
            num_kv_heads=kv_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=eps,
            one_plus=one_plus,
            pages=Pages(k, v, slots),
            pdl=pdl,
            impl=impl,
        )
        return *heads_of_rows, k, v

    many, cap = min(MAX_TOP, len(head)), model.final_softcap

    def statistics(num_top: int, impl: Implementation) -> tuple[Tensor, ...]:
        found = vocab_statistics(x, head, chosen, num_top=num_top, softcap=cap, impl=impl)
        lse, top, top_logits = found
        assert top is not None and top_logits is not None  # noqa: S101, PT018  (it was asked for)
        # Ids may differ where two tokens are as likely; their logits may not.
        rows = chosen.repeat_interleave(num_top)
        best = label_logits(x, head, rows, top.reshape(-1), softcap=cap, impl="reference")
        return lse, best, top_logits.reshape(-1)

    def logits(impl: Implementation) -> tuple[Tensor, ...]:
        return (label_logits(x, head, chosen, labels, softcap=cap, impl=impl),)

    def norm(impl: Implementation) -> tuple[Tensor, ...]:
        weight = layer.input_norm
        return add_rms_norm(x, delta, weight, eps=eps, one_plus=one_plus, pdl=pdl, impl=impl)

    yield "add_rms_norm", norm
    yield "gated", lambda i: (gated(gate_up, model.activation, pdl=pdl, impl=i),)
    yield "qk_norm_rope_store", with_pages
    yield "label_logits", logits
    yield "vocab_statistics", lambda i: statistics(1, i)
    yield "vocab_statistics with many tokens", lambda i: statistics(many, i)


def filled_batch(tokens: int, scored: int, vocab: int, page_size: int) -> PackedBatch:
    """Return a batch of exactly `tokens` random tokens and at most `scored` scored rows.

    The first half is a query, whose first tokens are kept on page 0; the rest are its items.
    """
    rng, items = np.random.default_rng(0), min(scored, tokens // 2)
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    length = tokens // 2 // items if items else 0
    query = tokens - items * length
    slots = np.where(np.arange(query) < page_size, np.arange(query), -1).astype(np.int32)
    segments = [Segment(ids[:query], 0, 0, slots=slots, label_ids=None if items else ids[:1])]
    for start in range(query, tokens, max(1, length)):
        item = ids[start : start + length]
        segments.append(Segment(item, query, 0, parent=0, label_ids=ids[:1]))
    return pack(segments, [Prefix(0, slots[:0])])


def check_replay(tokens: int, replayed: Tensor, launched: Tensor) -> None:
    """Raise ConfigError if a CUDA graph computed something else than the launches it repeats.

    Args:
        tokens: that the graph holds, for the error.
        replayed, launched: hidden states of the same rows, [M, hidden].
    """
    # What overflows in a number format, with random tokens, is a zero on both sides.
    finite = (x.float().nan_to_num(0.0, 0.0, 0.0) for x in (replayed, launched))
    error, tolerance = _distance(*finite), TOLERANCE[launched.dtype]
    if not error <= tolerance:
        raise ConfigError(
            f"the CUDA graph for {tokens} tokens computes something else than the same kernels "
            f"launched one by one: the relative error is {error:.1e}, allowed {tolerance:.0e}; "
            f"choose --cuda-graph-tokens 0"
        )


def _fill(sides: tuple[Tensor, Tensor], generator: torch.Generator) -> None:
    """Fill two pools with the same random numbers, rounded to the first one's dtype."""
    first, second = sides
    first.copy_(torch.randn(first.shape, generator=generator))
    second.copy_(first)


def compare(choice: str, where: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    error = _distance(got, want)
    if not error <= tolerance:
        raise ConfigError(
            f"{choice} computes something else than the reference on this machine{where}: "
            f"the relative error of a known answer is {error:.1e}, allowed {tolerance:.0e}; "
            f"choose another {choice.split()[0]}"
        )


def _distance(got: Tensor, want: Tensor) -> float:
    """Norm of the error over the norm of the answer."""
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))
