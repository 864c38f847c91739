"""Weights pickled by torch as a source: tensors are read without running code of the file."""

import json
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.commands.convert.source import refusing
from gpuscore.errors import UsageError
from gpuscore.models.files import (
    MAX_JSON,
    MAX_TEMPLATE,
    MAX_TOKENIZER,
    as_object,
    is_file,
    read_object,
    shown,
)

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
INDEX, SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# What `serve` reads beside weights, config.json and tokenizer.json; each with its most bytes.
_COPIED = {
    "tokenizer_config.json": MAX_JSON,
    "special_tokens_map.json": MAX_JSON,
    "added_tokens.json": MAX_JSON,
    "generation_config.json": MAX_JSON,
    "chat_template.jinja": MAX_TEMPLATE,
    "chat_template.json": MAX_JSON,
}
# From the files of older tokenizers transformers makes tokenizer.json.
_OLDER = ("vocab.json", "merges.txt", "tokenizer.model")


class BinSource:
    """A model directory with pytorch_model.bin or its shards. A `Source`.

    Raises:
        ConfigError: a file is missing or damaged, or has values that are not tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_object(path / CONFIG)
        if self._config is None:
            raise UsageError(f"{path} has no {CONFIG}")
        if self._config.get("quantization_config") is not None:
            raise UsageError(f"{path} is quantised ({CONFIG}); supported: plain weights")
        read_architecture(RawConfig(self._config))
        if not any(is_file(path / name, MAX_TOKENIZER) for name in (TOKENIZER, *_OLDER)):
            raise UsageError(f"{path} has no tokenizer ({', '.join((TOKENIZER, *_OLDER))})")
        self._shards = {name: _load(path / name) for name in _shard_names(path)}
        self._file_of = _by_name(path, self._shards)
        sizes: Counter[torch.dtype] = Counter()
        for shard in self._shards.values():
            for tensor in shard.values():
                sizes[tensor.dtype] += tensor.numel()
        most = sizes.most_common(1)[0][0]
        self.suggested = DTYPES.get(most, "bfloat16")
        self.why = f"most of its numbers are {str(most).removeprefix('torch.')}"

    def write(self, directory: Path, dtype: str) -> None:
        """Write the directory, a file for each shard; see `Source`."""
        config = dict(self._config or {}, dtype=dtype)
        config.pop("torch_dtype", None)
        (directory / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        for name, limit in _COPIED.items():
            if is_file(self.path / name, limit):
                shutil.copyfile(self.path / name, directory / name)
        self._write_tokenizer(directory)
        wanted = getattr(torch, dtype)
        weight_map: dict[str, str] = {}
        for number, (shard, tensors) in enumerate(self._shards.items(), start=1):
            count = len(self._shards)
            name = f"model-{number:05}-of-{count:05}.safetensors"
            name = name if count > 1 else "model.safetensors"
            # Copies, because safetensors writes no tensors that share memory.
            copies = {
                key: tensor.to(wanted, copy=True).contiguous() for key, tensor in tensors.items()
            }
            with refusing(directory / name):
                save_file(copies, directory / name, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            del copies, shard
        if len(self._shards) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            path = directory / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _write_tokenizer(self, directory: Path) -> None:
        if is_file(self.path / TOKENIZER, MAX_TOKENIZER):
            shutil.copyfile(self.path / TOKENIZER, directory / TOKENIZER)
            return
        self._make_tokenizer().save(str(directory / TOKENIZER))

    def _make_tokenizer(self) -> Tokenizer:
        with refusing(self.path):
            made: Any = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
            backend: Tokenizer = made.backend_tokenizer
        return backend

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor as it is stored; None if the files do not have it."""
        return self._shards[self._file_of[name]][name] if name in self._file_of else None

    def check_texts(self, directory: Path) -> None:
        """Compare the files byte by byte; see `Source`."""
        names = [name for name in (TOKENIZER, *_COPIED) if (self.path / name).exists()]
        for name in names:
            if (self.path / name).read_bytes() != (directory / name).read_bytes():
                raise UsageError(f"{self.path / name} was not copied as it is")


def _shard_names(path: Path) -> list[str]:
    if is_file(path / SINGLE):  # takes precedence over an index, as in transformers
        return [SINGLE]
    content = read_object(path / INDEX)
    if content is None:
        raise UsageError(f"{path} has neither {SINGLE} nor {INDEX}")
    names = as_object(content.get("weight_map"), f"{path / INDEX}: weight_map").values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not is_file(path / name):
            raise UsageError(f"{path / INDEX} names {shown(name)}, which is not a file of {path}")
    return sorted(set(names))


def _load(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, whose numbers are mapped and not read yet."""
    size = path.stat().st_size
    with refusing(path):
        if not zipfile.is_zipfile(path):
            raise UsageError(f"{path} is damaged, or written by torch before 1.6")
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > size:
            raise UsageError(f"{path} has {size:,} bytes and would become {unpacked:,}")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict):
        raise UsageError(f"{path} has {type(content).__name__}, and not tensors by name")
    total = 0
    for name, tensor in content.items():
        if not isinstance(name, str) or type(tensor) is not Tensor:
            raise UsageError(f"{path} has {shown(name)}, which is no tensor")
        total += tensor.numel() * tensor.element_size()
    if total > 2 * size:  # a tied head is there twice
        raise UsageError(f"{path} has {size:,} bytes for tensors of {total:,}")
    return content


def _by_name(path: Path, shards: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for file, tensors in shards.items():
        for name in tensors:
            if name in file_of:
                raise UsageError(f"{path}: {file_of[name]} and {file} have a tensor {shown(name)}")
            file_of[name] = file
    if not file_of:
        raise UsageError(f"{path} has no tensors")
    index = read_object(path / INDEX) if SINGLE not in shards else None
    for name, file in ({} if index is None else index["weight_map"]).items():
        if file_of.get(name) != file:
            raise UsageError(f"{path / INDEX}: {file} has no tensor {shown(name)}")
    return file_of
