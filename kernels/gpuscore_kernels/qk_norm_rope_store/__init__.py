"""QK norm, rotary embedding and the store of keys and values, in one pass over the QKV product."""

from dataclasses import dataclass

from torch import Tensor

from gpuscore_kernels.reference import QkvHeads


@dataclass(frozen=True, slots=True)
class Pages:
    """The KV pages of one layer, and the slots of a batch's rows in them.

    Args:
        k, v: [Hkv, slots, D], with equal strides; the elements of a head are contiguous.
        slots: int32 or int64 [T], all different; a row with a negative slot is not kept.
        read: int32 [P], P a multiple of 16: slots that are read into P more rows of k and v. Rows
            of slot -1 become zeros; rows of a lower slot are not written. None = no such rows.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    read: Tensor | None = None


def qk_norm_rope_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: QkvHeads, pages: Pages | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads, norm and rotate queries and keys, and store keys and values.

    Args:
        qkv: [T, (H + 2 Hkv) D]: queries, keys, values; the elements of a row are contiguous, rows
            need not be.
        cos, sin: float32 [T, D / 2], for the pairs (i, i + D / 2).
        heads: the heads of the product.
        pages: also write keys and values there.

    Returns:
        q [T, H, D], k and v [T, Hkv, D] in qkv's dtype. v is qkv's own memory; q and k are
        contiguous. Norm and rotation together are float32 and round once.
        With slots that are read, k and v are [T + P, Hkv, D], and v is memory of its own if P > 0.
        If a value of a kept row (without pages or with `read`: of any row) is not finite, its
        head's value becomes zeros there, and the key NaN. So only rows that see the token get NaN:
        a mask replaces the score of a key, but a weight of 0 would not hide a NaN in the value.
    """
    from gpuscore_kernels.qk_norm_rope_store import triton  # needs Triton

    return triton.qk_norm_rope_store(qkv, cos, sin, heads, pages=pages)
