"""Input and content of a tile table; NumPy only."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]

# Columns of `TileTable.tiles`.
(
    ROW_START,  # first row of the tile in `rows` ...
    NUM_ROWS,  # ... and number of rows
    MASKED_START,  # in `masked`: first tile before the full ones ...
    MASKED_AFTER,  # ... first tile after them ...
    MASKED_END,  # ... and the end
    POOL_START,  # in `pool_tiles`: full tiles of the cached prefix
    POOL_END,
    NUM_PACKED,  # full tiles of this batch: the i-th starts at row
    NUM_PARENT,  # (i < NUM_PARENT ? PARENT_BASE : OWN_BASE) + i * keys
    PARENT_BASE,
    OWN_BASE,
) = range(11)
TILE_FIELDS = 11
# Columns of `TileTable.masked`.
KEY_START, NUM_KEYS, KEY_POSITION, SEGMENT, IS_PACKED = range(5)
MASKED_FIELDS = 5
SHARED = -1  # SEGMENT of keys that every row of a tile may see


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of tiles; `keys` divides the page size and `own` divides `keys`."""

    rows: int  # tokens of a query tile; the kernel has a row per token and head of a KV head
    keys: int  # of a full tile
    own: int  # of a masked tile


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths of a packed batch: T tokens, S segments, R requests, P pages. All int32.

    A row sees its request's cached prefix, all of its segment's parent (but not the parent's own
    parent) and its segment up to itself. In this order the keys are at positions 0, 1, 2, ...
    """

    positions: Ints  # [T]
    cu_seqlens: Ints  # [S + 1]
    parent: Ints  # [S], -1 = none
    request_of: Ints  # [S]
    prefix_lens: Ints  # [R]
    page_table: Ints  # [R, P]
    page_size: int


@dataclass(frozen=True, slots=True)
class TileTable:
    """The table that the kernel reads; M query rows, int32 throughout."""

    shape: TileShape
    window: int | None
    own_only: bool  # without prefix and parent
    rows: Ints  # [3, M] in the order of tiles: query row, its position, its segment
    tiles: Ints  # [n, TILE_FIELDS], tiles with most keys first
    pool_tiles: Ints  # first slot of every full tile of a cached prefix
    masked: Ints  # [*, MASKED_FIELDS]
