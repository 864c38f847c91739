"""A node of the cluster as the driver knows it, and the model's files on it."""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gpuscore import __version__
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory

MODEL_FILES = (".json", ".safetensors", ".jinja")  # that a score depends on
SHORT_ID = 8  # digits of a node's id that people see

# A file's name -> bytes and SHA-256.
Digests: TypeAlias = Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node, by its own account.

    Attributes:
        id, address: of the node.
        python, gpuscore: versions.
        cores: of the machine, whatever Ray counts.
    """

    id: str
    address: str
    python: str
    gpuscore: str
    cores: int

    @property
    def name(self) -> str:
        return node_name(self.address, self.id)

    def check(self) -> None:
        """Raise ConfigError unless scores of this node can stand beside other nodes' scores."""
        for what, here, there in (
            ("gpuscore", __version__, self.gpuscore),
            ("Python", _minor(platform.python_version()), _minor(self.python)),
        ):
            if here != there:
                raise ConfigError(
                    f"{self.name} has {what} {there}, this machine has {here}; install the same "
                    "version on every node"
                )

    def check_files(self, model: str, here: Digests, there: Digests | str) -> None:
        """Raise ConfigError unless the node has the same model files as this machine."""
        if isinstance(there, str):
            raise ConfigError(f"{self.name} cannot load the model: {there}")
        for name in sorted({*here, *there}):
            if problem := _difference(here.get(name), there.get(name)):
                raise ConfigError(
                    f"MODEL {model}: on {self.name} {name} {problem}; put the same files on every "
                    "node, or name a directory that all of them share"
                )


def node_name(address: str, id: str) -> str:
    return f"node {address} ({id[:SHORT_ID]})"


def digests(directory: Path) -> dict[str, tuple[int, str]]:
    """Return sizes and SHA-256 of the files that a score depends on; reads them whole."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in MODEL_FILES:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.name] = (path.stat().st_size, digest)
    return found


def find_files(model: str, revision: str | None) -> dict[str, tuple[int, str]] | str:
    """Return `digests` of a model on this node, or why it has none."""
    try:
        return digests(model_directory(model, revision))
    except (ConfigError, OSError) as error:
        return str(error)


def _difference(here: tuple[int, str] | None, there: tuple[int, str] | None) -> str:
    if here == there:
        return ""
    if there is None:
        return "is missing"
    if here is None:
        return "is there, but not on this machine"
    if here[0] != there[0]:
        return f"has {there[0]} bytes, {here[0]} on this machine"
    return "has another SHA-256 than on this machine"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
