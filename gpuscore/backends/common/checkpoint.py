"""The safetensors files of a Hugging Face directory: no pickle, no remote code."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.lora import LoraAdapter
from gpuscore.backends.common.quantization import BLOCK, EXPERTS, LINEAR
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.common.shards import ALL, Shard
from gpuscore.errors import ConfigError
from gpuscore.models.adapter import CONFIG, WEIGHTS
from gpuscore.models.files import as_object, is_file, read_object, shown

# Buffers that old checkpoints contain. They are computed here, not read.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
CAUSAL_HEAD = "lm_head.weight"  # not read if an adapter brings a classification head
_FORMATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_QUANTISED = {"int8": "I8", "fp8": "F8_E4M3"}


class CheckpointFiles:
    """The tensors of all files of a checkpoint, read one at a time. A context manager.

    Args:
        directory: the model directory, with config.json and the weights.
        architecture: names the tensors that must exist.
        framework: "pt" for torch tensors, "np" for NumPy arrays.
        shard: the part of the model that is read; by default all of it.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        architecture: Architecture,
        framework: Literal["pt", "np"],
        shard: Shard = ALL,
    ) -> None:
        self.architecture = architecture
        self.storage = architecture.storage
        self._framework = framework
        self._shard = shard
        self.shapes = weight_shapes(architecture.config)
        self._paths = weight_files(directory)
        self._stack = ExitStack()
        self._adapter: LoraAdapter | None = None
        self._adapter_directory = directory if is_file(directory / CONFIG) else None
        if self._adapter_directory is not None and self.storage is not None:
            raise ConfigError("--adapter: the base model is quantised; supported: one that is not")
        with ExitStack() as stack:
            stack.enter_context(self)
            self.reopen()
            for part, name in _required(self.architecture):
                self._check(part, name)  # all are checked before one is read
            stack.pop_all()  # all is well: the files stay open
        self._used: set[str] = set()

    def reopen(self) -> None:
        """Close the files and open them again.

        The files are memory-mapped: what was read counts as this process's memory until the file is
        closed.
        """
        self._stack.close()
        files = [_open_file(path, self._framework, self._stack) for path in self._paths]
        self._path_of = dict(zip(files, self._paths, strict=True))
        self._file_of = _by_name(files)
        if self._adapter_directory is not None:
            file = _open_file(self._adapter_directory / WEIGHTS, self._framework, self._stack)
            if self._adapter is None:
                shapes = {name: self.shapes[part] for part, name in _required(self.architecture)}
                self._adapter = LoraAdapter(self._adapter_directory, file, shapes)
            self._adapter.file = file
            whole = self._adapter.whole
            self._file_of |= dict.fromkeys(whole, _Renamed(file, whole))

    def tensor(self, part: str, name: str) -> Any:
        """Return this shard of the stored tensor `name`.

        `part` is what the tensor is in the model, such as "embed"; it determines the shape.

        With framework "np", a float8_e4m3fn tensor is returned as uint8.

        Raises:
            ConfigError: the tensor is missing, or has the wrong shape or dtype.
        """
        self._check(part, name)
        self._used.add(name)
        file = self._file_of[name]
        if self._framework == "np" and file.get_slice(name).get_dtype() == _QUANTISED["fp8"]:
            return _float8_bits(self._path_of[file], name)
        return self._read(part, name)

    def _read(self, part: str, name: str) -> Any:
        """Read only this shard of a tensor; add the adapter's change, if any."""
        file = self._file_of[name]
        shard_slice = self._shard.slice_of(part, self.architecture.config, self.shapes[part][0])
        if shard_slice is None:
            tensor = file.get_tensor(name)
        else:
            tensor = file.get_slice(name)[shard_slice.index]
        change = None if self._adapter is None else self._adapter.change(name, self._to_float32)
        if change is None:
            return tensor
        if shard_slice is not None:
            change = change[shard_slice.index]
        return self._to_float32(tensor) + change

    def _to_float32(self, tensor: Any) -> Any:
        return tensor.float() if self._framework == "pt" else tensor.astype(np.float32)

    def scale(self, part: str, name: str) -> Any | None:
        """Return the scale of the weight `name` as it is stored; None if it has none.

        Its shape is [] or [1] for one number, [O] or [O, 1] for a number per row of the weight,
        and [O / 128, K / 128], rounded up, for a number per block of 128 x 128.

        Raises:
            ConfigError: the scale has another shape or dtype.
        """
        scale = self._scale_name(part, name)
        if scale is None:
            return None
        self._used.add(scale)
        if self.storage is not None and self.storage.input_scale is not None:
            self._use_input_scale(name)
        return self._file_of[scale].get_tensor(scale)

    def _use_input_scale(self, name: str) -> None:
        """Check the stored scale of a layer's input.

        The scale is not used: only an 8-bit matrix product with static scales would need it.
        """
        assert self.storage is not None  # noqa: S101
        scale = f"{name.removesuffix('weight')}{self.storage.input_scale}"
        self._check_scale(scale, ((), (1,)))
        self._used.add(scale)

    def _scale_name(self, part: str, name: str) -> str | None:
        if self.storage is None or part not in LINEAR | EXPERTS:
            return None
        scale = name + self.storage.scale
        return scale if scale in self._file_of else None

    def _check(self, part: str, name: str) -> None:
        """Check that a required tensor exists, and check its shape and dtype."""
        if name not in self._file_of:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        stored = self._file_of[name].get_slice(name)
        if tuple(stored.get_shape()) != self.shapes[part]:
            raise ConfigError(
                f"tensor {name} has shape {list(stored.get_shape())}, "
                f"config.json asks for {list(self.shapes[part])}"
            )
        scale = self._scale_name(part, name)
        if scale is not None:
            self._check_quantised(part, name, scale, stored.get_dtype())
        elif stored.get_dtype() not in _FORMATS:
            raise ConfigError(
                f"tensor {name} is {stored.get_dtype()}; supported: {', '.join(_FORMATS.values())}"
            )

    def _check_quantised(self, part: str, name: str, scale: str, dtype: str) -> None:
        assert self.storage is not None  # noqa: S101
        expected = _QUANTISED[self.storage.weights]
        if dtype != expected:
            raise ConfigError(
                f"tensor {name} is {dtype} and has a scale, {scale}; "
                f"config.json asks for {expected}"
            )
        rows, columns = self.shapes[part]
        per_row: tuple[tuple[int, ...], ...] = ((), (1,), (rows,), (rows, 1))
        blocks = ((-(-rows // BLOCK), -(-columns // BLOCK)),)
        self._check_scale(scale, blocks if self.storage.blocks else per_row)

    def _check_scale(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        if name not in self._file_of:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        stored = self._file_of[name].get_slice(name)
        shape = tuple(stored.get_shape())
        dtype = stored.get_dtype()
        if shape not in shapes or dtype not in _FORMATS:
            raise ConfigError(
                f"tensor {name} is {dtype} {list(shape)}; supported: {', '.join(_FORMATS.values())}"
                f" of shape {' or '.join(str(list(allowed)) for allowed in shapes)}"
            )

    def refuse_left_over(self, tied: str | None) -> None:
        """Refuse a checkpoint with tensors that were not read.

        Args:
            tied: name of the head in a model with tied embeddings. Some checkpoints store it
                although it equals the embedding. If it differs from the embedding, it is refused,
                because transformers would use it.

        Raises:
            ConfigError: a tensor was not read, or the tied head differs from the embedding.
        """
        embedding = self.architecture.model_weights["embed"]
        if tied in self._file_of and not self._are_equal(embedding, tied):
            raise ConfigError(
                f"tensor {tied} differs from {embedding}, but config.json says that "
                "tie_word_embeddings is true; supported: false, or a checkpoint without this tensor"
            )
        storage = self.storage
        if storage and not any(n.endswith(f"weight{storage.scale}") for n in self._used):
            raise ConfigError(
                "config.json has a quantization_config, but no weight of a linear layer has a "
                f"scale, such as ...weight{storage.scale}; if nothing is quantised, delete that"
            )
        unread = [
            name
            for name in self._file_of
            if name not in self._used
            and name != tied
            and not (self._adapter_directory is not None and name == CAUSAL_HEAD)
            and not name.endswith(_COMPUTED)
            and not name.startswith(self.architecture.unread)
        ]
        if unread:
            raise ConfigError(
                f"the checkpoint holds {len(unread)} tensors that "
                f"{self.architecture.config.architecture} does not use, such as {min(unread)}"
            )

    def _are_equal(self, name: str, other: str) -> bool:
        first, second = (self._file_of[key].get_slice(key).get_shape() for key in (name, other))
        if first != second:
            return False
        return bool((self._read("embed", name) == self._read("embed", other)).all())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _required(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Yield the part and the name of each tensor that the architecture requires."""
    config = architecture.config
    for part, name in architecture.model_weights.items():
        if part != "lm_head" or not config.tie_word_embeddings:
            yield part, name
    experts = config.mixture.num_experts if config.mixture is not None else 1
    for layer, weights in enumerate(architecture.layer_weights):
        for part, name in weights.items():
            for expert in range(experts if "{expert}" in name else 1):
                yield part, architecture.name(layer, part, expert)


class _Renamed:
    """An open file whose tensors are read by other names.

    Args:
        file: the file.
        names: maps the new names to the names in the file.
    """

    def __init__(self, file: Any, names: Mapping[str, str]) -> None:
        self._file = file
        self._names = names

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._names[name])


def _float8_bits(path: Path, name: str) -> Any:
    """Return a tensor of float8_e4m3fn as a NumPy array of uint8.

    NumPy has no such dtype, so safetensors reads it for other frameworks only. A file begins with
    the size of its header in 8 bytes, then the header. safetensors checked both when it opened the
    file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        start, end = entry["data_offsets"]
        file.seek(8 + size + start)
        return np.frombuffer(file.read(end - start), np.uint8).reshape(entry["shape"])


def _by_name(files: list[Any]) -> dict[str, Any]:
    file_of: dict[str, Any] = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118
            if name in file_of:
                raise ConfigError(f"two files of the checkpoint hold a tensor {shown(name)}")
            file_of[name] = file
    return file_of


def _open_file(path: Path, framework: str, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework=framework))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if is_file(single):  # takes precedence over an index, as in transformers
        return [single]
    content = read_object(index)
    if content is None:
        raise ConfigError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "supported: safetensors. If the repository has pytorch_model.bin, download all of it "
            "(`hf download NAME --local-dir DIR`) and serve DIR: the server says how to convert it"
        )
    names = as_object(content.get("weight_map"), f"{index}: weight_map").values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not is_file(directory / name):
            raise ConfigError(f"{index} names {shown(name)}, which is not a file of {directory}")
    return [directory / name for name in sorted(set(names))]
