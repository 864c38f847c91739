"""Where keys and values are kept beyond a batch."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """Where rows are kept beyond a batch.

    Args:
        k, v: [Hkv, slots, D], of one stride each; elements of a head lie side by side.
        slots: int32 or int64 [T]; no two rows have the same; those with a negative one are not
            kept.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
