"""The safetensors files of a Hugging Face directory: no pickle, no remote code."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from safetensors import SafetensorError, safe_open

from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.errors import ConfigError
from gpuscore.model_files import as_object, is_file, read_object, shown

# Buffers that old checkpoints contain; here they are computed.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_FORMATS = ("BF16", "F16", "F32", "F64")


class CheckpointFiles:
    """Named tensors of all shards, read one at a time. A context manager.

    Args:
        directory: the model directory, with config.json and the weights.
        architecture: names the tensors that must exist.
        framework: "pt" for torch tensors, "np" for NumPy arrays.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(
        self, directory: Path, architecture: Architecture, framework: Literal["pt", "np"]
    ) -> None:
        self.architecture = architecture
        self.shapes = weight_shapes(architecture.config)
        self._stack = ExitStack()
        with ExitStack() as stack:
            files = [_open_file(path, framework, stack) for path in _weight_files(directory)]
            self._file_of = _by_name(files)
            self._check()
            self._stack = stack.pop_all()
        self._used: set[str] = set()

    def tensor(self, part: str, name: str) -> Any:
        """Return the tensor `name` as it is stored; it must have the shape of `part`.

        Raises:
            ConfigError: the tensor is missing, or has the wrong shape or dtype.
        """
        self._check_one(part, name)
        self._used.add(name)
        return self._file_of[name].get_tensor(name)

    def _check(self) -> None:
        """Check name, shape and dtype of every required tensor before any is read or allocated."""
        config, model = self.architecture.config, self.architecture.model_weights
        for part, name in model.items():
            if part != "lm_head" or not config.tie_word_embeddings:
                self._check_one(part, name)
        experts = config.mixture.num_experts if config.mixture is not None else 1
        for layer, weights in enumerate(self.architecture.layer_weights):
            for part, name in weights.items():
                for expert in range(experts if "{expert}" in name else 1):
                    self._check_one(part, f"model.layers.{layer}.{name.format(expert=expert)}")

    def _check_one(self, part: str, name: str) -> None:
        if name not in self._file_of:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        stored = self._file_of[name].get_slice(name)
        if tuple(stored.get_shape()) != self.shapes[part]:
            raise ConfigError(
                f"tensor {name} has shape {list(stored.get_shape())}, "
                f"config.json asks for {list(self.shapes[part])}"
            )
        if stored.get_dtype() not in _FORMATS:
            raise ConfigError(
                f"tensor {name} is {stored.get_dtype()}; supported: bfloat16, float16, float32"
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
        if tied in self._file_of and not self._same(embedding, tied):
            raise ConfigError(
                f"tensor {tied} differs from {embedding}, but config.json says that "
                "tie_word_embeddings is true; supported: false, or a checkpoint without this tensor"
            )
        left = [
            name
            for name in self._file_of
            if name not in self._used and name != tied and not name.endswith(_COMPUTED)
        ]
        if left:
            raise ConfigError(
                f"the checkpoint holds {len(left)} tensors that "
                f"{self.architecture.config.architecture} does not use, such as {min(left)}"
            )

    def _same(self, name: str, other: str) -> bool:
        one, two = (self._file_of[name].get_tensor(name) for name in (name, other))
        return one.shape == two.shape and bool((one == two).all())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _by_name(files: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118
            if name in found:
                raise ConfigError(f"two files of the checkpoint hold a tensor {shown(name)}")
            found[name] = file
    return found


def _open_file(path: Path, framework: str, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework=framework))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if is_file(single):  # takes precedence over an index, as in transformers
        return [single]
    content = read_object(index)
    if content is None:
        raise ConfigError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "supported: safetensors"
        )
    names = as_object(content.get("weight_map"), f"{index}: weight_map").values()
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not is_file(directory / name):
            raise ConfigError(f"{index} names {shown(name)}, which is not a file of {directory}")
    return [directory / name for name in sorted(set(names))]
