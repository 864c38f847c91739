"""A check at start that attention, and CUDA graphs, agree with their references on this machine."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuscore.backends.common import known_answer as common
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.known_answer import REQUESTS, by_the_rule, check_error, known_batch
from gpuscore.backends.torch.attention.choice import Factory
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.errors import ConfigError
from gpuscore.types.batch import PackedBatch, Prefix, Segment, pack

TOLERANCE = {getattr(torch, name): most for name, most in common.TOLERANCE.items()}

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
    config = replace(model, num_layers=len(windows), windows=windows, delta_net=None)
    batch = known_batch(page_size, MANY_ITEMS + REQUESTS if name == "flashinfer" else REQUESTS)
    pool = KVPool(config, batch.page_table.size, page_size, dtype, device)
    with torch.inference_mode():
        tested = factory(config, pool).prepare(batch)
        generator = torch.Generator().manual_seed(0)
        for layer in range(config.num_layers):
            for side in pool.layers[layer]:
                side.copy_(torch.randn(side.shape, generator=generator))
            q, k, v = (
                torch.randn(batch.num_tokens, heads, config.head_dim, generator=generator)
                .to(dtype)
                .to(device)
                for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            )
            exact = by_the_rule(
                batch,
                page_size,
                config.windows[layer],
                config.attention_scale,
                config.attention_softcap,
                [_exact(side).swapaxes(0, 1) for side in pool.layers[layer]],
                [_exact(x) for x in (q, k, v)],
            )
            expected = torch.from_numpy(exact.astype(np.float32)).to(device)
            last = layer == config.num_layers - 1
            rows = batch.score_rows if last else np.arange(batch.num_tokens)
            # Chosen by a kernel, since one that begins early may not stand behind a copy.
            chosen = torch.from_numpy(rows.astype(np.int64)).to(device)
            q, expected = q[chosen], expected[chosen]
            got = tested.run(layer, q, k, v)
            compare(f"--attention {name}", "", got, expected, TOLERANCE[dtype])


def _exact(x: Tensor) -> NDArray[np.float64]:
    return x.cpu().double().numpy()


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
    """Raise ConfigError if a CUDA graph computed other numbers than the launches it repeats.

    Args:
        tokens: number that the graph holds, for the error.
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


def compare(choice: str, where: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    check_error(choice, where, _distance(got, expected), tolerance)


def _distance(got: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of the answer."""
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
