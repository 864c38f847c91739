"""Attention of some rows over some of their keys, and the exact merge of such partial results.

For one row q over keys K_a the partial result is o_a = softmax(q K_a^T / sqrt(D)) V_a with
l_a = log sum exp(q K_a^T / sqrt(D)). Over two disjoint key sets a and b

    o = (exp(l_a) o_a + exp(l_b) o_b) / (exp(l_a) + exp(l_b)),    l = log(exp(l_a) + exp(l_b))

With this all items attend to a shared prefix in one dense pass (Hydragen, arXiv 2402.05099).

torch's CPU flash operator returns the log-sum-exp. It crashes the process if there are no rows or
no keys, and gives lse 0 instead of -inf to a row whose keys are all masked; both are handled here.
It has no soft-cap, so attention with one is computed here in tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Implementation: TypeAlias = Literal["reference", "cpu"]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # of q, k, v

ROW_TILE = 256  # rows computed together if there is a mask; with a window they share a key range
CAPPED_TILE = 1 << 21  # float32 scores that a pass with a soft-cap holds at a time
MAX_TILE = 1 << 24  # elements of one [B, H, m, S] tile of scores


@dataclass(frozen=True, slots=True)
class Visibility:
    """The masking arguments of `partial_attention`, explained there."""

    causal: bool
    key_mask: Tensor | None  # bool [B, S]
    first_key: Tensor | None  # int64 [M]

    def hidden(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """Mask of hidden keys, [B or 1, 1, rows, keys], true = hidden; None if all are visible."""
        if self.key_mask is not None:
            return ~self.key_mask[:, None, None, keys].expand(-1, 1, rows.stop - rows.start, -1)
        if not self.causal and self.first_key is None:
            return None
        key = torch.arange(keys.start, keys.stop, device=device)
        row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
        hidden = key > row if self.causal else torch.zeros_like(key > row)
        if self.first_key is not None:
            hidden = hidden | (key < self.first_key[rows].unsqueeze(1))
        return hidden[None, None]

    def span(self, rows: slice, num_keys: int) -> slice:
        """Range of keys that holds every key visible to a row of `rows`, ignoring `key_mask`."""
        first = 0 if self.first_key is None else max(0, int(self.first_key[rows].min()))
        last = rows.stop if self.causal else num_keys
        return slice(min(first, last), last)


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
        key_mask: bool [B, S], True = visible to every row.
        first_key: int64 [M], row m does not see keys before first_key[m]: the lower edge of a
            sliding window. Not together with `key_mask`.
        softcap: scores s = scale * q k^T become softcap * tanh(s / softcap), before the softmax
            and the log-sum-exp.
        skip_hidden: leave out keys that `first_key` hides from all rows computed together. If
            false, every sum is over all S keys, so a row's bits do not depend on the other rows'
            windows.
        impl: "reference" (any device, never leaves out keys) or "cpu".

    Returns:
        out [B, H, M, D] in q's dtype, and lse [B, H, M], natural log (float32; float64 for float64
        inputs). A row without visible keys has out 0 and lse -inf. A value that is not finite
        reaches the rows that see it, and no other.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, k, v, causal, key_mask, first_key)
    visible = Visibility(causal, key_mask, first_key)
    if impl == "reference":
        return _by_definition(q, k, v, scale=scale, visible=visible, softcap=softcap)
    attend: Attend = partial(
        _on_cpu, scale=scale, visible=visible, softcap=softcap, skip_hidden=skip_hidden
    )
    out, lse = attend(q, k, v)
    masked = causal or key_mask is not None or first_key is not None
    return _kept_apart(q, k, v, attend) if masked and out.sum().isnan() else (out, lse)


def _kept_apart(q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Attend so that a key or value that is not finite reaches only rows that see it.

    Operators multiply a hidden key's value by 0, and may add -inf to its score: both leave NaN.
    """
    flawed = ~(k.isfinite() & v.isfinite()).all(-1, keepdim=True)  # [B, Hkv, S, 1]
    out, lse = attend(q, k.masked_fill(flawed, 0), v.masked_fill(flawed, 0))
    # Keys of 0 have one weight, so this is the share of flawed keys among those that a row sees.
    share, _ = attend(q, torch.zeros_like(k), flawed.to(v.dtype).expand_as(v).contiguous())
    return out.masked_fill_(share > 0, torch.nan), lse


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


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Visibility, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute in plain torch: float32 scores, softmax and sums; nothing waits for a device."""
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    out, lse = _nothing(q)
    if rows == 0 or keys == 0 or batch == 0:
        return out, lse
    group = heads // k.shape[1]
    # A hidden key's score is replaced, but its value is multiplied by 0, which leaves NaN.
    flawed = ~(k.isfinite() & v.isfinite()).all(-1, keepdim=True)
    k_all = k.to(compute).masked_fill(flawed, torch.nan).repeat_interleave(group, dim=1)
    v_all = v.to(compute).masked_fill(flawed, 0).repeat_interleave(group, dim=1)
    step = max(1, MAX_TILE // (batch * heads * keys))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        scores = q[:, :, part].to(compute) @ k_all.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = visible.hidden(part, slice(0, keys), q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        tile_lse = torch.logsumexp(scores, dim=-1)
        base = torch.where(tile_lse == -torch.inf, torch.zeros_like(tile_lse), tile_lse)
        out[:, :, part] = (torch.exp(scores - base.unsqueeze(-1)) @ v_all).to(q.dtype)
        lse[:, :, part] = tile_lse
    return out, lse


def _on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    visible: Visibility,
    softcap: float | None,
    skip_hidden: bool,
) -> tuple[Tensor, Tensor]:
    if 0 in q.shape or k.shape[2] == 0:
        return _nothing(q)
    if softcap is None and visible.first_key is None:
        return _flash(q, k, v, scale, visible)
    out, lse = _nothing(q)
    for rows in _row_tiles(q, k, softcap):
        keys = visible.span(rows, k.shape[2]) if skip_hidden else slice(0, k.shape[2])
        if keys.stop > keys.start:
            hidden = visible.hidden(rows, keys, q.device)
            tile = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            out[:, :, rows], lse[:, :, rows] = (
                _flash_masked(*tile, scale, hidden)
                if softcap is None
                else _capped(*tile, scale, hidden, softcap)
            )
    return out, lse


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of rows that see no key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)


def _row_tiles(q: Tensor, k: Tensor, softcap: float | None) -> list[slice]:
    batch, heads, rows, _ = q.shape
    step = ROW_TILE
    if softcap is not None:
        most = max(1, min(step, CAPPED_TILE // (batch * heads * k.shape[2])))
        step = 1 << (most.bit_length() - 1)  # a power of two: few row counts leave a smaller tile
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Visibility
) -> tuple[Tensor, Tensor]:
    if visible.key_mask is not None:
        hidden = visible.hidden(slice(0, q.shape[2]), slice(0, k.shape[2]), q.device)
        return _flash_masked(q, k, v, scale, hidden)
    shape = q.shape
    if not visible.causal:
        q = _fold_heads(q, k)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, visible.causal, attn_mask=None, scale=scale
    )
    return out.reshape(shape), lse.reshape(shape[:3])


def _fold_heads(q: Tensor, k: Tensor) -> Tensor:
    """Make rows of the heads that share a KV head: fewer, larger matrix products."""
    batch, heads, rows, dim = q.shape
    return q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)


def _flash_masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias = None
    if hidden is not None:
        bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        bias = bias.expand(len(q), -1, -1, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    if hidden is None:
        return out, lse
    blind = hidden.all(dim=-1).expand(lse.shape)
    return out.masked_fill_(blind.unsqueeze(-1), 0), lse.masked_fill_(blind, -torch.inf)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Compute one tile in float32: the cap comes before the mask and the log-sum-exp."""
    compute = torch.promote_types(q.dtype, torch.float32)
    folded = _fold_heads(q, k).to(compute)
    scores = (folded @ k.to(compute).transpose(-1, -2)).mul_(scale / softcap)
    scores = scores.tanh_().mul_(softcap).view(*q.shape[:3], -1)  # [B, H, m, s]
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    base = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
    weights = scores.sub_(base.unsqueeze(-1)).exp_().view(*folded.shape[:3], -1)
    return (weights @ v.to(compute)).view(q.shape).to(q.dtype), lse
