"""Finds scales of a quantised checkpoint that belong to another layer, without scoring a prompt.

A row's scale is its largest magnitude divided by a constant. So if a row has an outlier, its scale
is larger and its stored numbers are smaller: over the rows of a matrix, scales and stored
magnitudes are negatively correlated. With the scales of another layer they are not. With one scale
per tensor there is no correlation, and nothing is found.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.quantization import BLOCK, LINEAR
from gpuscore.errors import ConfigError

logger = logging.getLogger(__name__)

ROWS = 1024  # of each matrix, from its beginning
# Scales are misplaced if another layer's fit better by GAIN in rank correlation, and by ERRORS
# standard errors of its Fisher transform. In SmolLM2 and the demo the largest gain is 0.1.
GAIN = 0.25
ERRORS = 5.0


def check_scales(directory: Path, architecture: Architecture, allow: bool) -> None:
    """Compare all layers' scales with all layers' numbers, for each part of a layer.

    Args:
        directory, architecture: a quantised checkpoint, and what its config.json describes.
        allow: log the reason for a refusal, and do not refuse.

    Raises:
        ConfigError: a tensor's numbers fit the scales of another layer much better than their own.
    """
    with CheckpointFiles(directory, architecture, "pt") as files:
        found = [line for part in sorted(LINEAR) for line in _misplaced(files, part)]
    if not found:
        return
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    if not allow:
        raise ConfigError(
            f"{found[0]}{more}; use another checkpoint, or serve this one in spite of that with "
            "--allow-degenerate"
        )
    logger.warning("%s%s (--allow-degenerate)", found[0], more)


def _misplaced(files: CheckpointFiles, part: str) -> list[str]:
    """Say which tensors of a part fit the scales of another layer much better than their own."""
    blocks = files.storage is not None and files.storage.blocks
    names = []
    scales = []
    numbers = []
    for layer, weights in enumerate(files.architecture.layer_weights):
        name = files.architecture.name(layer, part) if part in weights else None
        scale = None if name is None else files.scale(part, name)
        if name is None or scale is None or scale.numel() < 2:
            continue
        names.append(name)
        scales.append(_ranks(scale.float()[:ROWS].flatten()))
        numbers.append(_ranks(_magnitudes(files.tensor(part, name), blocks)))
    if len(names) < 2:
        return []
    fits = torch.stack(scales) @ torch.stack(numbers).T  # [layer of scales, layer of numbers]
    z = torch.atanh(fits.clamp(-0.999, 0.999)) * max(0, len(scales[0]) - 3) ** 0.5
    best = fits.argmin(dim=0)
    return [
        f"the numbers of tensor {name} fit the scales of {names[other]} (rank correlation "
        f"{fits[other, layer]:.2f}), not their own ({fits[layer, layer]:.2f})"
        for layer, (name, other) in enumerate(zip(names, best.tolist(), strict=True))
        if fits[other, layer] < fits[layer, layer] - GAIN
        and z[other, layer] < z[layer, layer] - ERRORS
    ]


def _magnitudes(weight: Tensor, blocks: bool) -> Tensor:
    """Return the mean square of the stored numbers that share a scale, [rows] or [blocks]."""
    if not blocks:
        return weight[:ROWS].float().square().mean(dim=1)
    squares = weight[: ROWS * BLOCK].float().square()
    return functional.avg_pool2d(squares[None], BLOCK, ceil_mode=True).flatten()


def _ranks(values: Tensor) -> Tensor:
    """Return ranks with mean 0 and length 1; those of rows of zeros are 0."""
    ranks = values.argsort().argsort().float()
    ranks = torch.where(values == 0, ranks[values != 0].mean(), ranks)
    centred = (ranks - ranks.mean()).nan_to_num()
    return functional.normalize(centred, dim=0)
