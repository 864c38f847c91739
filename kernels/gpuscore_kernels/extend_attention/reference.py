"""Extend attention in plain torch, the reference of the kernels.

It reads the same tile table as they do. For each tile it gathers the keys and takes one softmax.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpuscore_kernels.extend_attention.table import (
    BATCH_ROW,
    FIRST_ROW,
    IS_PACKED,
    KEY_POSITION,
    KEY_START,
    NUM_KEYS,
    POSITION,
    QUERY_ROW,
    SAME,
    SEGMENT,
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
    """Compute `triton.extend_attention`. It does not synchronize if the table is on the host.

    With steady tiles, the shapes of a row's operations depend only on the keys that the row sees.
    """
    q, k, v = rows
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k.shape[1]
    for tile in tiles.tiles.tolist():
        members = tiles.rows[:, tile[0] : tile[0] + tile[1]].long().cpu()
        places, packed, visible = _keys(tiles, tile, members)
        seen_by_any = visible.any(0).nonzero()[:, 0]
        visible = visible[:, seen_by_any]
        places = places[seen_by_any]
        packed = packed[seen_by_any]
        tile_keys = _gather(k, pool[0], places, packed).to(compute)
        tile_values = _gather(v, pool[1], places, packed).to(compute)
        step = 1 if tiles.shape.is_steady else tile[1]
        for start in range(0, tile[1], step):
            part = slice(start, start + step)
            mask = visible[part]
            keys = tile_keys
            values = tile_values
            if step < tile[1]:
                seen = mask.any(0).nonzero()[:, 0]
                mask = mask[:, seen]
                keys = tile_keys[:, seen.to(q.device)]
                values = tile_values[:, seen.to(q.device)]
            query_rows = members[QUERY_ROW][part].to(q.device)
            # Rows of all heads that share keys are multiplied together: [Hkv, rows * group, D].
            by_head = q[query_rows].to(compute).view(-1, len(keys), group, q.shape[2])
            by_head = by_head.transpose(0, 1).flatten(1, 2)
            scores = by_head @ keys.mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            masked = ~mask.repeat_interleave(group, 0).to(q.device)
            weights = scores.masked_fill_(masked, -torch.inf).softmax(dim=-1)
            result = (weights @ values).view(len(keys), -1, group, q.shape[2])
            out[query_rows] = result.transpose(0, 1).flatten(1, 2).to(q.dtype)
    return out


def _gather(batch: Tensor, pool: Tensor, places: Tensor, packed: Tensor) -> Tensor:
    """Gather keys or values, [Hkv, keys, D].

    A place is a row of `batch` where `packed` is true, else a slot of `pool`.
    """
    order = torch.cat((packed.nonzero()[:, 0], (~packed).nonzero()[:, 0])).argsort()
    rows, slots = (places[source].to(batch.device) for source in (packed, ~packed))
    both = torch.cat((batch[rows].transpose(0, 1), pool[:, slots]), dim=1)
    return both[:, order.to(batch.device)]


def _keys(tiles: DeviceTiles, tile: list[int], members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys of a tile, in the order in which the kernel reads them.

    Returns:
        The places of the keys, which are rows of the batch or slots of the pool; whether each key
        is a row; and the mask, bool [rows, keys].
    """
    offsets = torch.arange(tiles.shape.keys)
    places = []
    packed = []
    visible = []
    for is_packed, start, entry in _tiles_of_keys(tiles, tile):
        key = offsets if entry is None else offsets[: entry[NUM_KEYS]]
        places.append(start + key)
        packed.append(torch.full(key.shape, is_packed))
        if entry is None:
            visible.append(torch.ones(members.shape[1], len(key), dtype=torch.bool))
        else:
            position = key + entry[KEY_POSITION]
            visible.append(_visible(position, entry[SEGMENT], members, tiles.window))
    return torch.cat(places), torch.cat(packed), torch.cat(visible, dim=1)


def _tiles_of_keys(
    tiles: DeviceTiles, tile: list[int]
) -> Iterator[tuple[bool, int, list[int] | None]]:
    """Yield for each tile of keys: whether they are rows, the first place, and the masked entry.

    The entry is None if all rows of the tile see all of the keys.
    """
    _, _, begin, after, end, pool_begin, pool_end, num_packed, num_root, root, segment = tile
    for entry in tiles.masked[begin:after].tolist():
        yield bool(entry[IS_PACKED]), entry[KEY_START], entry
    for slot in tiles.pool_tiles[pool_begin:pool_end].tolist():
        yield False, slot, None
    for i in range(num_packed):
        yield True, (root if i < num_root else segment) + i * tiles.shape.keys, None
    for entry in tiles.masked[after:end].tolist():
        yield bool(entry[IS_PACKED]), entry[KEY_START], entry


def _visible(key: Tensor, segment: int, members: Tensor, window: int | None) -> Tensor:
    """Return which keys the rows see, bool [rows, keys].

    For a SAME segment `key` holds rows of the batch, else positions.
    """
    first = members[FIRST_ROW].unsqueeze(1)
    newest = members[BATCH_ROW if segment == SAME else POSITION].unsqueeze(1)
    visible = torch.le(key, newest)
    if window is not None:
        visible = visible & (key > newest - window)
    if segment == SHARED:
        return visible
    return visible & (torch.ge(key, first) if segment == SAME else torch.eq(first, segment))
