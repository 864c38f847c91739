"""Files beside a model's weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Head:
    """The classes of a model whose head is a classifier and not a vocabulary.

    Args:
        names: in the order of their logits.
        exclusive: exactly one of them is right: probabilities are a softmax, else sigmoids.
    """

    names: tuple[str, ...]
    exclusive: bool


def read_json(path: Path) -> Any:
    """A JSON file; None if there is none."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
