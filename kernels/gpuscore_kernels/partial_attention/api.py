"""Attention of some rows over some of their keys, and the exact merge of such partial results.

For one row q over keys K_a the partial result is o_a = softmax(q K_a^T / sqrt(D)) V_a with
l_a = log sum exp(q K_a^T / sqrt(D)). Over two disjoint key sets a and b

    o = (exp(l_a) o_a + exp(l_b) o_b) / (exp(l_a) + exp(l_b)),    l = log(exp(l_a) + exp(l_b))

With this all items attend to a shared prefix in one dense pass (Hydragen, arXiv 2402.05099).
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gpuscore_kernels.partial_attention import cpu, reference
from gpuscore_kernels.partial_attention.visibility import Visibility

Implementation: TypeAlias = Literal["reference", "cpu"]


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    key_mask: Tensor | None = None,
    first_key: Tensor | None = None,
    softcap: float | None = None,
    skip_hidden: bool = True,
    impl: Implementation,
) -> tuple[Tensor, Tensor]:
    """Attend `q` to `k`, `v`.

    Args:
        q: [B, H, M, D].
        k, v: [B, Hkv, S, D]; H is a multiple of Hkv, head h reads KV head h // (H / Hkv).
        scale: factor on q k^T.
        causal: row m sees keys 0..m (needs M == S; not together with `key_mask`).
        key_mask: bool [B, S], True = visible to every row. Masked keys must still be finite.
        first_key: int64 [M], row m does not see keys before first_key[m]: the lower edge of a
            sliding window. Not together with `key_mask`. Hidden keys must still be finite.
        softcap: scores s = scale * q k^T become softcap * tanh(s / softcap), before the softmax
            and the log-sum-exp.
        skip_hidden: leave out keys that `first_key` hides from all rows computed together. If
            false, every sum is over all S keys, so a row's bits do not depend on the other rows'
            windows.
        impl: "reference" (any device, never leaves out keys) or "cpu".

    Returns:
        out [B, H, M, D] in q's dtype, and lse [B, H, M], natural log (float32; float64 for float64
        inputs). A row without visible keys has out 0 and lse -inf.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, k, v, causal, key_mask, first_key)
    visible = Visibility(causal, key_mask, first_key)
    if impl == "reference":
        return reference.partial_attention(q, k, v, scale=scale, visible=visible, softcap=softcap)
    return cpu.partial_attention(
        q, k, v, scale=scale, visible=visible, softcap=softcap, skip_hidden=skip_hidden
    )


def merge_partials(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint keys: out [..., D] and lse [...]; out keeps out_a's dtype.

    The weights and the sum are float32 (float64 if the log-sum-exps are).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # If both sides are empty, lse is -inf; subtracting 0 instead makes both weights exp(-inf) = 0.
    base = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    weight_a = torch.exp(lse_a - base).unsqueeze(-1)
    weight_b = torch.exp(lse_b - base).unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    first_key: Tensor | None,
) -> None:
    batch, heads, rows, dim = q.shape
    kv_batch, kv_heads, keys, kv_dim = k.shape
    if k.shape != v.shape or (batch, dim) != (kv_batch, kv_dim) or heads % kv_heads:
        raise ValueError(f"shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    if causal and (rows != keys or key_mask is not None):
        raise ValueError(f"causal needs as many rows as keys and no mask: {rows} rows, {keys} keys")
    if key_mask is not None and key_mask.shape != (batch, keys):
        raise ValueError(f"key_mask must be {(batch, keys)}, got {tuple(key_mask.shape)}")
    if first_key is not None and (key_mask is not None or first_key.shape != (rows,)):
        raise ValueError(
            f"first_key must be {(rows,)} and without key_mask, got {tuple(first_key.shape)}"
        )
