"""Models as files: their identity, and models without their last layers.

The identity has digests of all that decides scores, however a model's files are split. Models
without their last layers show in which one scores go wrong: norm and head follow on the last layer
that is left. So every backend can compute the model, and no backend has to show what is inside it.
"""

import hashlib
import json
import mmap
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpuscore.backends.common.checkpoint import weight_files
from gpuscore.errors import ConfigError
from gpuscore.models.files import is_file, read_object

INDEX = "model.safetensors.index.json"
# Fields of config.json that do not change a score.
_IRRELEVANT = ("_name_or_path", "transformers_version", "use_cache")
_WEIGHTS = (".safetensors", INDEX)
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The SHA-256 digests of a model, in hexadecimal."""

    weights: str  # of names, formats, shapes and bytes of all tensors, ordered by name
    config: str  # of config.json, without fields that change no score
    tokenizer: str | None  # of tokenizer.json


def fingerprint(directory: Path) -> Fingerprint:
    """Compute a model's fingerprint, reading all weights once.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    config = directory / "config.json"
    fields = read_object(config)
    if fields is None:
        raise ConfigError(f"{config} is missing")
    kept = {name: value for name, value in fields.items() if name not in _IRRELEVANT}
    tokenizer = directory / "tokenizer.json"
    return Fingerprint(
        weights=_digest_of_weights(directory),
        config=sha256(json.dumps(kept, sort_keys=True).encode()),
        tokenizer=sha256(tokenizer.read_bytes()) if is_file(tokenizer) else None,
    )


def _digest_of_weights(directory: Path) -> str:
    """Digest the tensors, not the files, so that the split into shards does not matter."""
    tensors: dict[str, str] = {}
    for path in weight_files(directory):
        try:
            tensors |= _digests(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(f"{name}\0{tensors[name]}\n".encode())
    return total.hexdigest()


def _digests(path: Path) -> dict[str, str]:
    """Digest each tensor of a file: a length in 8 bytes, a JSON header, and the data."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8:start])
        header.pop("__metadata__", None)
        digests = {}
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            digest = hashlib.sha256(f"{tensor['dtype']} {tensor['shape']}\n".encode())
            with memoryview(data) as view, view[start + begin : start + end] as part:
                digest.update(part)
            digests[name] = digest.hexdigest()
        return digests


def sha256(content: bytes) -> str:
    """Return a digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class CutModels:
    """A model's weights in a file for each layer, from which shorter models are made.

    Args:
        directory: the model.
        folder: an empty folder with as much room as the weights take.

    Raises:
        ConfigError: the model has no config.json with `num_hidden_layers`, or damaged weights.
    """

    def __init__(self, directory: Path, folder: Path) -> None:
        self._directory, self._folder = directory, folder
        self._config = read_object(directory / "config.json") or {}
        layers = self._config.get("num_hidden_layers")
        if not isinstance(layers, int) or layers < 1:
            raise ConfigError(f"{directory / 'config.json'}: num_hidden_layers is {layers!r}")
        self.layers = layers
        self._files = self._write_layers()

    def of(self, layers: int) -> Path:
        """Return the directory of the model with its first `layers` layers."""
        made = self._folder / f"first-{layers}"
        made.mkdir()
        for path in self._directory.iterdir():
            if not path.name.endswith(_WEIGHTS) and path.name != "config.json":
                (made / path.name).symlink_to(path.resolve())
        weight_map: dict[str, str] = {}
        for layer, (file, names) in self._files.items():
            if layer < layers:
                (made / file.name).symlink_to(file)
                weight_map |= dict.fromkeys(names, file.name)
        index = {"metadata": {}, "weight_map": weight_map}
        (made / INDEX).write_text(json.dumps(index), encoding="utf-8")
        (made / "config.json").write_text(json.dumps(self._cut_config(layers)), encoding="utf-8")
        return made

    def _cut_config(self, layers: int) -> dict[str, Any]:
        cut = {
            name: value[:layers] if isinstance(value, list) and len(value) == self.layers else value
            for name, value in self._config.items()
            if name != "architectures"  # a list, too, but not of layers
        }
        own = {"architectures": self._config.get("architectures"), "num_hidden_layers": layers}
        return cut | own

    def _write_layers(self) -> dict[int, tuple[Path, list[str]]]:
        """Write the tensors of each layer to a file; -1 stands for tensors outside of layers."""
        from safetensors.torch import save_file  # with torch, which a comparison does without

        of_layers: dict[int, dict[str, Any]] = defaultdict(dict)
        for path in weight_files(self._directory):
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118  (no mapping)
                match = _LAYER.search(name)
                of_layers[int(match[1]) if match else -1][name] = file
        written = {}
        for layer, file_of in of_layers.items():
            target = self._folder / f"layer{layer}.safetensors"
            tensors = {name: file.get_tensor(name) for name, file in file_of.items()}
            save_file(tensors, target, {"format": "pt"})
            written[layer] = target, list(file_of)
        return written


def _opened(path: Path) -> Any:
    """Open a file for torch, which has all dtypes, so that tensors are copied bit by bit."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
