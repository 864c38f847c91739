"""KV pages, to which the kernel writes keys and values."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """The KV pages of one layer, and the slots of a batch's rows in them.

    Args:
        k, v: [Hkv, slots, D], with equal strides; the elements of a head are contiguous.
        slots: int32 or int64 [T], all different; a row with a negative slot is not kept.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
