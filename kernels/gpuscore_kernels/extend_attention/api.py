"""Attention of a packed batch over cached pages and over itself, in one launch.

The mask rule: a row sees its request's cached prefix, all of its segment's ancestors and its own
segment up to itself. A tile table (`tiles`), built once per batch, lists the keys that rows see.
"""

from torch import Tensor

from gpuscore_kernels.extend_attention.config import TileConfig
from gpuscore_kernels.extend_attention.table import DeviceTiles


def extend_attention(
    rows: tuple[Tensor, Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    tiles: DeviceTiles,
    *,
    scale: float,
    softcap: float | None = None,
    config: TileConfig,
) -> Tensor:
    """Attend the query rows of `tiles`.

    Args:
        rows: q [M, H, D] of the table's M rows; k and v [T, Hkv, D] of all rows of the batch. H is
            a multiple of Hkv, D at most 256.
        pool: k and v [Hkv, slots, D], cached ones by slot. Slots that no row sees have no effect,
            even if they hold NaN.
        tiles: the batch's table, of the shape `config.shape(H // Hkv)`.
        scale: factor on q k^T, over 0.
        softcap: scores s = scale * q k^T become softcap * tanh(s / softcap), before the softmax.
        config: sizes of the kernel's tiles.

    They are float32, float16 or bfloat16 on CUDA; float32 or float16 in Triton's interpreter on a
    CPU, which computes bfloat16 wrongly. The last dimension of every tensor is contiguous; other
    strides are free.

    Returns:
        [M, H, D] in q's dtype. Sums are float32; weights are rounded to v's dtype before they are
        multiplied with v.
    """
    from gpuscore_kernels.extend_attention.triton import launch  # only where Triton is

    return launch(rows, pool, tiles, scale, softcap=softcap, config=config)
