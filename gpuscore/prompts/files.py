"""Files beside a model's weights."""

from dataclasses import dataclass
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.model_files import as_object, read_object, shown


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """Of a model whose head is a classifier and not a vocabulary.

    Args:
        num_classes: at least one.
        exclusive: exactly one of them is right, so probabilities are a softmax; else sigmoids.
    """

    num_classes: int
    exclusive: bool


def read_classifier_head(directory: Path) -> ClassifierHead | None:
    """None for a language model.

    Raises:
        ConfigError: config.json does not say how many classes there are.
    """
    if not architecture_name(directory).endswith("ForSequenceClassification"):
        return None
    path = directory / "config.json"
    config = read_object(path) or {}
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels", 2)  # transformers' default
    else:
        count = len(as_object(names, f"{path}: id2label"))
    if type(count) is not int or count < 1:
        raise ConfigError(f"{path}: num_labels must be a positive integer, found {shown(count)}")
    several = config.get("problem_type") == "multi_label_classification"
    return ClassifierHead(count, exclusive=count > 1 and not several)


def architecture_name(directory: Path) -> str:
    """As config.json names it; empty if it names none."""
    names = (read_object(directory / "config.json") or {}).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
