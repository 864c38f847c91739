"""The definition of a tile table in plain torch: gather a tile's keys, one softmax over them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.table import (
    BATCH_ROW,
    POSITION,
    QUERY_ROW,
    SAME,
    SHARED,
    DeviceTiles,
)


def extend_attention(
    rows: tuple[Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    tiles: DeviceTiles,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Compute `api.extend_attention`; nothing waits for a device if the table is on the host.

    With steady tiles, the shapes of a row's operations depend on the row's own keys alone.
    """
    q, k, v = rows
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k.shape[1]
    for tile in tiles.tiles.tolist():
        members = tiles.rows[:, tile[0] : tile[0] + tile[1]].long().cpu()
        slots, packed, visible = _keys(tiles, tile, members)
        some = visible.any(0).nonzero()[:, 0]
        visible = visible[:, some]
        sides = [
            _gather(packed_rows, pool[side], slots[some], packed[some]).to(compute)
            for side, packed_rows in enumerate((k, v))
        ]
        step = 1 if tiles.shape.is_steady else tile[1]
        for start in range(0, tile[1], step):
            part = slice(start, start + step)
            seen, keys, values = visible[part], *sides
            if step < tile[1]:
                near = seen.any(0).nonzero()[:, 0]
                seen = seen[:, near]
                keys, values = (side[:, near.to(q.device)] for side in sides)
            query_rows = members[QUERY_ROW][part].to(q.device)
            # Rows of all heads that share keys are multiplied together: [Hkv, rows * group, D].
            by_head = q[query_rows].to(compute).view(-1, len(keys), group, q.shape[2])
            by_head = by_head.transpose(0, 1).flatten(1, 2)
            scores = by_head @ keys.mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            hidden = ~seen.repeat_interleave(group, 0).to(q.device)
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
            result = (weights @ values).view(len(keys), -1, group, q.shape[2])
            out[query_rows] = result.transpose(0, 1).flatten(1, 2).to(q.dtype)
    return out


def _gather(batch: Tensor, pool: Tensor, places: Tensor, packed: Tensor) -> Tensor:
    """Gather keys or values, [Hkv, keys, D]: rows of the batch where `packed`, else slots."""
    order = torch.cat((packed.nonzero()[:, 0], (~packed).nonzero()[:, 0])).argsort()
    rows, slots = (places[which].to(batch.device) for which in (packed, ~packed))
    both = torch.cat((batch[rows].transpose(0, 1), pool[:, slots]), dim=1)
    return both[:, order.to(batch.device)]


def _keys(tiles: DeviceTiles, tile: list[int], members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places of a tile's keys in the kernel's order: rows or slots; True for rows; and bool
    [rows, keys], true for visible keys."""
    offsets = torch.arange(tiles.shape.keys)
    places = []
    packed = []
    visible = []
    for is_packed, start, entry in _tiles_of_keys(tiles, tile):
        key = offsets if entry is None else offsets[: entry[1]]
        places.append(start + key)
        packed.append(torch.full(key.shape, is_packed))
        if entry is None:
            visible.append(torch.ones(members.shape[1], len(key), dtype=torch.bool))
        else:
            visible.append(_visible(key + entry[2], entry[3], members, tiles.window))
    return torch.cat(places), torch.cat(packed), torch.cat(visible, dim=1)


def _tiles_of_keys(
    tiles: DeviceTiles, tile: list[int]
) -> Iterator[tuple[bool, int, list[int] | None]]:
    """Yield the tiles of keys: are they rows of the batch, where they start, and a masked entry."""
    _, _, begin, after, end, pool_begin, pool_end, num_packed, num_root, root, segment = tile
    for entry in tiles.masked[begin:after].tolist():
        yield bool(entry[4]), entry[0], entry
    for slot in tiles.pool_tiles[pool_begin:pool_end].tolist():
        yield False, slot, None
    for i in range(num_packed):
        yield True, (root if i < num_root else segment) + i * tiles.shape.keys, None
    for entry in tiles.masked[after:end].tolist():
        yield bool(entry[4]), entry[0], entry


def _visible(key: Tensor, segment: int, members: Tensor, window: int | None) -> Tensor:
    """Return which keys the rows see; of SAME keys, `key` is a row of the batch."""
    first = members[2].unsqueeze(1)
    newest = members[BATCH_ROW if segment == SAME else POSITION].unsqueeze(1)
    visible = torch.le(key, newest)
    if window is not None:
        visible = visible & (key > newest - window)
    if segment == SHARED:
        return visible
    return visible & (torch.ge(key, first) if segment == SAME else torch.eq(first, segment))
