"""The check of a converted directory: by the readers of `serve`, and against its source."""

from pathlib import Path

import torch
from torch import Tensor

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles, required_tensors
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.commands.convert.source import Counted, Source
from gpuscore.errors import ConfigError
from gpuscore.models.hub import refuse_other_formats
from gpuscore.prompts.model import ModelFiles


def check_directory(directory: Path, source: Source, dtype: str, done: Counted) -> None:
    """Read the directory as `serve` does, and compare all of it with its source.

    Args:
        directory: the written directory.
        source: the source that it was made from.
        dtype: of the written tensors.
        done: called after each tensor.

    Raises:
        ConfigError: `serve` would refuse it, or something differs from the source.
    """
    refuse_other_formats(directory)
    ModelFiles.read(directory, "auto", [directory.name])
    source.check_texts(directory)
    architecture = read_architecture(RawConfig.read(directory))
    with CheckpointFiles(directory, architecture, "pt") as files:
        for part, name in required_tensors(architecture):
            _compare(name, files.tensor(part, name), source, dtype)
            done(1)
        tied = architecture.config.tie_word_embeddings
        files.refuse_left_over(architecture.model_weights["lm_head"] if tied else None)


def _compare(name: str, written: Tensor, source: Source, dtype: str) -> None:
    original = source.tensor(name)
    if original is None:
        raise ConfigError(f"{source.path} has no tensor {name}")
    if not bool(torch.isfinite(original).all()):
        raise ConfigError(f"{source.path}: tensor {name} holds NaN or infinity")
    wanted = original.to(getattr(torch, dtype))
    if not bool(torch.isfinite(wanted).all()):
        raise ConfigError(
            f"{source.path}: tensor {name} has {original.abs().max():g}, too much for {dtype}; "
            "choose --dtype bfloat16 or float32"
        )
    if written.dtype != wanted.dtype or not torch.equal(written, wanted):
        raise ConfigError(f"tensor {name} was not written as {source.path} has it")
