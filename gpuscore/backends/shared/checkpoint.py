"""The safetensors files of a Hugging Face directory: no pickle, no remote code."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from safetensors import SafetensorError, safe_open

from gpuscore.backends.shared.families import Family
from gpuscore.backends.shared.shapes import weight_shapes
from gpuscore.errors import ConfigError

# Buffers that old checkpoints carry and that are computed here instead.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_FORMATS = ("BF16", "F16", "F32", "F64")


class CheckpointFiles:
    """Named tensors of all shards, read one at a time. A context manager.

    Args:
        directory: of config.json and the weights.
        family: which tensors there must be.
        framework: whose tensors are wanted: torch's, or NumPy's arrays.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(self, directory: Path, family: Family, framework: Literal["pt", "np"]) -> None:
        self.family = family
        self.shapes = weight_shapes(family.config)
        self._stack = ExitStack()
        with ExitStack() as stack:
            files = [_open_file(path, framework, stack) for path in _weight_files(directory)]
            self._file_of: dict[str, Any] = {
                name: file
                for file in files
                for name in file.keys()  # noqa: SIM118
            }
            self._stack = stack.pop_all()
        self._used: set[str] = set()

    def tensor(self, part: str, name: str) -> Any:
        """The tensor `name` as it is stored, which must have the shape of `part`.

        Raises:
            ConfigError: it is missing, or of the wrong shape or kind.
        """
        if name not in self._file_of:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        self._used.add(name)
        file = self._file_of[name]
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != self.shapes[part]:
            raise ConfigError(
                f"tensor {name} has shape {list(stored.get_shape())}, "
                f"config.json asks for {list(self.shapes[part])}"
            )
        if stored.get_dtype() not in _FORMATS:
            raise ConfigError(
                f"tensor {name} is {stored.get_dtype()}; supported: bfloat16, float16, float32"
            )
        return file.get_tensor(name)

    def refuse_left_over(self, tied: str | None) -> None:
        """ConfigError for tensors that nobody read.

        Args:
            tied: the head that some checkpoints store although it is the embedding.
        """
        left = [
            name
            for name in self._file_of
            if name not in self._used and name != tied and not name.endswith(_COMPUTED)
        ]
        if left:
            raise ConfigError(
                f"the checkpoint holds {len(left)} tensors that "
                f"{self.family.config.architecture} does not use, such as {min(left)}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _open_file(path: Path, framework: str, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework=framework))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return [single]
        raise ConfigError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "supported: safetensors"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ConfigError(f"{index} names {name!r}, which is not a file of {directory}")
    return [directory / name for name in names]
