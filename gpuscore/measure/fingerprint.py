"""A model's identity: digests of all that decides scores, however its files are split."""

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

from gpuscore.backends.common.checkpoint import weight_files
from gpuscore.errors import ConfigError
from gpuscore.measure.results import Fingerprint, sha256
from gpuscore.models.files import is_file, read_object

# Fields of config.json that do not change a score.
_IRRELEVANT = ("_name_or_path", "transformers_version", "use_cache")


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
