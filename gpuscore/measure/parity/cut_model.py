"""Models without their last layers, to find out in which one scores go wrong.

Norm and head follow on the last layer that is left. So every backend can compute the model, and no
backend has to show what is inside it.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import as_object, read_object

INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", INDEX)
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class CutModels:
    """A model's weights in a file for each layer, of which shorter models are made.

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
        """Write the tensors of each layer to a file; those of no layer have the number -1."""
        places: dict[int, dict[str, Path]] = defaultdict(dict)
        for path in self._weight_files():
            for name in _header(path):
                found = _LAYER.search(name)
                places[int(found[1]) if found else -1][name] = path
        files = {}
        for layer, names in places.items():
            file = self._folder / f"layer{layer}.safetensors"
            _copy_tensors(names, file)
            files[layer] = file, list(names)
        return files

    def _weight_files(self) -> list[Path]:
        index = read_object(self._directory / INDEX)
        if index is None:
            return [self._directory / "model.safetensors"]
        names = as_object(index.get("weight_map"), f"{INDEX}: weight_map").values()
        return [self._directory / name for name in sorted(set(map(str, names)))]


def _header(path: Path) -> dict[str, Any]:
    """Read the names, formats, shapes and places of a safetensors file's tensors."""
    try:
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
    header.pop("__metadata__", None)
    return header


def _copy_tensors(places: dict[str, Path], target: Path) -> None:
    """Write tensors, named with the files that have them, to a safetensors file, bit by bit."""
    headers = {path: _header(path) for path in set(places.values())}
    described, end = {}, 0
    for name, path in places.items():
        begin, stop = headers[path][name]["data_offsets"]
        offsets = [end, end + stop - begin]
        described[name] = headers[path][name] | {"data_offsets": offsets}
        end = offsets[1]
    head = json.dumps({"__metadata__": {"format": "pt"}} | described).encode()
    with target.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for name, path in places.items():
            begin, stop = headers[path][name]["data_offsets"]
            with path.open("rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                file.seek(start + begin)
                out.write(file.read(stop - begin))
