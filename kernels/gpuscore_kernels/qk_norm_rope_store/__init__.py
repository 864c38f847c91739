"""QK norm, rotary embedding and the store of keys and values, in one pass over the QKV product."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """The KV pages of one layer, and the slots of a batch's rows in them.

    Args:
        k, v: [Hkv, slots, D], with equal strides; the elements of a head are contiguous.
        slots: int32 or int64 [T], all different; a row with a negative slot is not kept.
        read: int32 [P], P a multiple of 16: slots that are read into P more rows of k and v. The
            rows of -1 become zeros, and those of less are left as they are. None = no such rows.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    read: Tensor | None = None


def qk_norm_rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    one_plus: bool = False,
    pages: Pages | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads, norm and rotate queries and keys, and store keys and values.

    Args:
        qkv: [T, (H + 2 Hkv) D]: queries, keys, values; the elements of a row are contiguous, rows
            need not be.
        cos, sin: float32 [T, D / 2], for the pairs (i, i + D / 2).
        num_heads: H; 0 if there are only keys and values.
        num_kv_heads: Hkv; 0 if there are only queries.
        q_norm, k_norm: [D], weights of the norm of each head; both or neither.
        eps: of the norms.
        one_plus: Gemma's norms, see `add_rms_norm`.
        pages: also write keys and values there.

    Returns:
        q [T, H, D], k and v [T, Hkv, D] in qkv's dtype. v is qkv's own memory; q and k are
        contiguous. Norm and rotation together are float32 and round once.
        With slots that are read, k and v are [T + P, Hkv, D], and v is memory of its own if P > 0.
        If a value of a kept row (without pages or with `read`: of any row) is not finite, its
        head's value becomes zeros there, and the key NaN. A mask replaces the score of a hidden
        key, but a weight of 0 times NaN is NaN; so only rows that see the token get NaN.

    Raises:
        ValueError: shapes do not fit.
    """
    shape, norms = (qkv.shape[0], qkv.shape[1]), (q_norm, k_norm)
    head_dim = check_heads(shape, cos, sin, (num_heads, num_kv_heads), norms, pages)
    from gpuscore_kernels.qk_norm_rope_store import triton  # only where Triton is

    sizes = num_heads, num_kv_heads, head_dim
    return triton.qk_norm_rope_store(qkv, cos, sin, sizes, q_norm, k_norm, eps, one_plus, pages)


def check_heads(
    shape: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor | None, Tensor | None],
    pages: Pages | None,
) -> int:
    """Return D, after checks of the arguments that follow a QKV product of `shape`.

    Raises:
        ValueError: shapes do not fit.
    """
    head_dim = 2 * cos.shape[-1]
    columns = (heads[0] + 2 * heads[1]) * head_dim
    table = (shape[0], head_dim // 2)
    if shape[1] != columns or cos.shape != table or sin.shape != table:
        raise ValueError(
            f"shapes do not fit: qkv {shape}, cos {tuple(cos.shape)}, sin "
            f"{tuple(sin.shape)} for {heads[0]} query heads and {heads[1]} KV heads"
        )
    if (norms[0] is None) != (norms[1] is None):
        raise ValueError("q_norm and k_norm must both be given, or neither")
    for norm in norms:
        if norm is not None and norm.shape != (head_dim,):
            raise ValueError(f"norm weights must be {(head_dim,)}, got {tuple(norm.shape)}")
    if pages is not None:
        _check_pages(pages, shape[0], heads[1], head_dim)
    return head_dim


def _check_pages(pages: Pages, rows: int, num_kv_heads: int, head_dim: int) -> None:
    k, v = pages.k, pages.v
    fits = k.shape == v.shape and k.stride() == v.stride() and k.stride(2) == 1
    if not fits or (k.shape[0], k.shape[2]) != (num_kv_heads, head_dim):
        raise ValueError(
            f"pages must be [{num_kv_heads}, slots, {head_dim}] of one stride, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if pages.slots.shape != (rows,):
        raise ValueError(f"slots must be {(rows,)}, got {tuple(pages.slots.shape)}")
