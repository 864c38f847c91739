"""Files beside a model's weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Head:
    """Of a model whose head is a classifier and not a vocabulary.

    Args:
        num_classes: at least one.
        exclusive: exactly one of them is right, so probabilities are a softmax; else sigmoids.
    """

    num_classes: int
    exclusive: bool


def read_head(directory: Path) -> Head | None:
    """None for a language model. What the backend checks is not checked here."""
    if not read_architecture(directory).endswith("ForSequenceClassification"):
        return None
    config = read_json(directory / "config.json")
    names = config.get("id2label")
    count = config.get("num_labels", 2) if names is None else len(names)  # transformers' default
    several = config.get("problem_type") == "multi_label_classification"
    return Head(count, exclusive=count > 1 and not several)


def read_architecture(directory: Path) -> str:
    """As config.json names it; empty if it names none."""
    config = read_json(directory / "config.json") or {}
    return str(next(iter(config.get("architectures") or []), ""))


def read_json(path: Path) -> Any:
    """A JSON file; None if there is none."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
