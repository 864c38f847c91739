"""Visibility of keys to the rows of a partial attention pass."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
