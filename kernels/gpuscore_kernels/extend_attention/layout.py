"""Input and content of a tile table; NumPy only.

Named tuples, because a small batch waits for its tables: frozen dataclasses take longer to make.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Wide: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

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
    NUM_ROOT,  # (i < NUM_ROOT ? ROOT_BASE : OWN_BASE) + i * keys
    ROOT_BASE,
    OWN_BASE,
) = range(11)
TILE_FIELDS = 11
# Columns of `TileTable.masked`. KEY: the position of the first key; for OWN its row in the batch.
KEY_START, NUM_KEYS, KEY, WHOSE, IS_PACKED = range(5)
MASKED_FIELDS = 5
# WHOSE: the first row of the segment whose rows see the keys, or one of these.
SHARED = -1  # every row of the tile sees them
OWN = -2  # a row sees the keys of its own segment, up to itself
# Rows of `TileTable.rows`.
QUERY_ROW, BATCH_ROW, FIRST_ROW, POSITION = range(4)  # FIRST_ROW: the first row of its segment
ROW_FIELDS = 4


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of tiles; `keys` divides the page size and `own` divides `keys`."""

    rows: int  # tokens of a query tile; the kernel has a row per token and head of a KV head
    keys: int  # of a full tile
    own: int  # of a masked tile
    # A row's tiles do not depend on other rows: keys come in the order of positions, and a masked
    # tile holds keys of one segment. `own` is then `keys`.
    is_steady: bool = False


class Layout(NamedTuple):
    """Lengths of a packed batch: T tokens, S segments, R requests, P pages. All int32.

    A row sees its request's cached prefix, all of its segment's ancestors from the root down, and
    its segment up to itself. In this order the keys are at positions 0, 1, 2, ...
    """

    positions: Ints  # [T]
    cu_seqlens: Ints  # [S + 1]
    parent: Ints  # [S], -1 = none
    request_of: Ints  # [S]
    prefix_lens: Ints  # [R]
    page_table: Ints  # [R, P]
    page_size: int


class TileTable(NamedTuple):
    """The table that the kernel reads; M query rows, int32 throughout."""

    shape: TileShape
    window: int | None
    rows: Ints  # [ROW_FIELDS, M] in the order of tiles
    tiles: Ints  # [n, TILE_FIELDS], tiles with most keys first
    pool_tiles: Ints  # first slot of every full tile of a cached prefix
    masked: Ints  # [*, MASKED_FIELDS]


def ancestors_from_root(parent: Ints) -> list[Wide]:
    """Return the roots of all segments, then the ancestors below them, and so on to the parents.

    Each is [S], -1 = none; there are as many as the deepest segment has ancestors.
    """
    upwards: list[Wide] = []
    above = parent.astype(np.int64)
    while np.count_nonzero(above >= 0):
        upwards.append(above)
        above = np.where(above >= 0, parent[above], -1)
    if len(upwards) < 2:
        return upwards
    chain = np.stack(upwards)
    depth = np.count_nonzero(chain >= 0, axis=0)
    level = np.arange(len(chain))[:, None]
    from_root = np.take_along_axis(chain, np.maximum(depth - 1 - level, 0), axis=0)
    return [*np.where(level < depth, from_root, -1)]
