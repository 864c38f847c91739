"""The definition of a tile table in plain torch: gather a tile's keys, one softmax over them."""

import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.layout import OWN, QUERY_ROW, SHARED
from gpuscore_kernels.extend_attention.table import DeviceTiles


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: tuple[Tensor, Tensor],
    tiles: DeviceTiles,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Compute `api.extend_attention`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for tile in tiles.tiles.tolist():
        members = tiles.rows[:, tile[0] : tile[0] + tile[1]].long()
        rows = members[QUERY_ROW]
        slots, packed, visible = _keys(tiles, tile, members)
        keys, values = (
            _gather(own, pool[side], slots, packed).to(compute) for side, own in enumerate((k, v))
        )
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("mhd,hsd->mhs", q[rows].to(compute), keys.repeat_interleave(group, 0))
        scores = scores * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        result = torch.einsum("mhs,hsd->mhd", weights, values.repeat_interleave(group, 0))
        out[rows] = result.to(q.dtype)
    return out


def _gather(own: Tensor, pool: Tensor, slots: Tensor, packed: Tensor) -> Tensor:
    """Gather keys or values, [Hkv, keys, D]; the pool's come first."""
    return torch.cat((pool[:, slots], own[packed].transpose(0, 1)), dim=1)


def _keys(tiles: DeviceTiles, tile: list[int], members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slots and rows of a tile's keys, and bool [rows, keys], true for visible keys."""
    _, _, begin, _, end, pool_begin, pool_end, num_packed, num_root, root, own = tile
    size, count, device = tiles.shape.keys, members.shape[1], members.device
    offsets = torch.arange(size, device=device)
    slots = [int(slot) + offsets for slot in tiles.pool_tiles[pool_begin:pool_end]]
    packed = [(root if i < num_root else own) + i * size + offsets for i in range(num_packed)]
    # Keys of full tiles are visible to all rows.
    seen = {
        False: [torch.ones(count, size * len(slots), dtype=torch.bool, device=device)],
        True: [torch.ones(count, size * len(packed), dtype=torch.bool, device=device)],
    }
    for start, number, first, whose, is_packed in tiles.masked[begin:end].tolist():
        key = torch.arange(number, device=device)
        (packed if is_packed else slots).append(start + key)
        seen[bool(is_packed)].append(_visible(first + key, whose, members, tiles.window))
    none = torch.zeros(0, dtype=torch.long, device=device)
    visible = torch.cat((*seen[False], *seen[True]), dim=1)
    return torch.cat((none, *slots)), torch.cat((none, *packed)), visible


def _visible(key: Tensor, whose: int, members: Tensor, window: int | None) -> Tensor:
    """Return which keys the rows see; of OWN keys, `key` is a row of the batch."""
    _, row, first, position = members.unsqueeze(2)
    newest = row if whose == OWN else position
    visible = torch.le(key, newest)
    if window is not None:
        visible = visible & (key > newest - window)
    if whose == SHARED:
        return visible
    return visible & (torch.ge(key, first) if whose == OWN else torch.eq(first, whose))
