"""A GGUF file as a source: transformers reads it, and `gguf` reads it again to compare."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gpuscore.backends.common.architectures import Architecture, read_architecture
from gpuscore.backends.common.checkpoint import required_tensors
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.commands.convert import gguf_config, gguf_tokenizer
from gpuscore.commands.convert.gguf_file import GgufFile, unreadable
from gpuscore.commands.convert.source import refusing
from gpuscore.errors import UsageError
from gpuscore.models.files import shown

_NAME = "source.gguf"  # by which transformers gets the file
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufSource:
    """A GGUF file. A `Source`; nothing is loaded before `write`.

    Raises:
        UsageError: the file is damaged, or has content that cannot be converted.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, GgufFile(path)
        gguf_config.check_architecture(self._file)
        gguf_tokenizer.check_tokenizer(self._file)
        self._check_formats()
        formats = {
            tensor.kind.name for tensor in self._file.tensors.values() if len(tensor.shape) > 1
        }
        wide = formats - {"F32"} or {"F32"}  # an F16 file has its norms in F32
        self.suggested = _PLAIN.get(next(iter(wide)), "bfloat16") if len(wide) == 1 else "bfloat16"
        self.why = f"its matrices are {', '.join(sorted(formats))}"
        self._made: Any = None
        self._heads: tuple[int, int] = (0, 0)
        with self._alone() as directory, refusing(path):
            self._config = AutoConfig.from_pretrained(
                directory, gguf_file=_NAME, local_files_only=True
            )
        gguf_config.complete(self._config, self._file)
        self._heads = (self._config.num_attention_heads, self._config.num_key_value_heads)
        self._names = _name_map(self._file.architecture, self._config.num_hidden_layers)
        self._check_tensors(read_architecture(RawConfig(self._config.to_dict())))

    def _check_formats(self) -> None:
        if bad := unreadable({tensor.kind for tensor in self._file.tensors.values()}):
            raise UsageError(
                f"{self.path} has tensors in {', '.join(bad)}, which the package gguf does not "
                "dequantise"
            )

    def _check_tensors(self, architecture: Architecture) -> None:
        """Refuse missing tensors, which transformers would fill at random, and left-over ones."""
        shapes, used = weight_shapes(architecture.config), {gguf_config.ROPE_FREQS}
        for part, name in required_tensors(architecture):
            stored = self._stored_name(name)
            tensor = self._file.tensors.get(stored)
            if tensor is None:
                raise UsageError(f"{self.path} has no tensor {stored}")
            if tensor.shape != tuple(shapes[part]):
                raise UsageError(
                    f"{self.path}: tensor {stored} has shape {list(tensor.shape)}; its metadata "
                    f"asks for {list(shapes[part])}"
                )
            used.add(stored)
        if left := self._file.tensors.keys() - used:
            raise UsageError(
                f"{self.path} has {len(left)} tensors that {architecture.config.architecture} does "
                f"not use, such as {shown(min(left))}"
            )

    def _stored_name(self, name: str) -> str:
        """Return llama.cpp's name of a tensor of transformers."""
        base, _, ending = name.rpartition(".")
        return f"{self._names.get_name(base) or base}.{ending}"

    @contextmanager
    def _alone(self) -> Iterator[str]:
        """Give a directory with the file only, so that transformers reads nothing beside it."""
        with tempfile.TemporaryDirectory(prefix="gpuscore-") as directory:
            os.symlink(self.path.absolute(), Path(directory, _NAME))
            yield directory

    def write(self, directory: Path, dtype: str) -> None:
        """Write the directory; see `Source`."""
        with self._alone() as alone, refusing(self.path):
            self._made = AutoTokenizer.from_pretrained(
                alone, gguf_file=_NAME, local_files_only=True
            )
            gguf_tokenizer.complete(self._made, self._file)
            self._made.save_pretrained(directory)
            with _quiet():
                model: Any = AutoModelForCausalLM.from_pretrained(
                    alone,
                    config=self._config,
                    gguf_file=_NAME,
                    dtype=getattr(torch, dtype),
                    local_files_only=True,
                )
        model.hf_quantizer = None  # otherwise the model counts as quantised and cannot be saved
        for config in (model.config, model.config.get_text_config()):
            for name in ("quantization_config", "_model_name_or_path"):
                config.__dict__.pop(name, None)
        with _quiet():
            model.save_pretrained(directory)

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor in float32, made by `gguf` alone; None if the file does not have it.

        llama.cpp stores Llama's queries and keys in another order of rows, because its RoPE rotates
        other pairs, and stores Gemma's norms with 1 added.
        """
        stored = self._stored_name(name)
        if stored not in self._file.tensors:
            return None
        values = self._file.values(stored)
        if self._file.architecture == "llama" and ".attn_q." in stored:
            values = _interleaved(values, self._heads[0])
        elif self._file.architecture == "llama" and ".attn_k." in stored:
            values = _interleaved(values, self._heads[1])
        elif self._file.architecture.startswith("gemma") and stored.endswith("norm.weight"):
            values = values - 1
        return torch.from_numpy(np.array(values))

    def check_texts(self, directory: Path) -> None:
        """Compare tokenizer and template; see `Source`."""
        with refusing(directory / "tokenizer.json"):
            written = Tokenizer.from_file(str(directory / "tokenizer.json"))
        gguf_tokenizer.check_written(written, self._made.backend_tokenizer, self._file)
        path = directory / "chat_template.jinja"
        template = path.read_text(encoding="utf-8") if path.exists() else None
        if template != gguf_tokenizer.template(self._file):
            raise UsageError(f"{self.path}: its chat template was not written as it is")


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in transformers' order: of each head first all first numbers of the pairs."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _name_map(architecture: str, layers: int) -> TensorNameMap:
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, layers)


def _quiet() -> Any:
    """Keep the progress bars of transformers from a log; on a terminal they are shown."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO())
