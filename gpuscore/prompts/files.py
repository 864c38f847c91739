"""Reading config.json: the architecture's name and the classifier head."""

from dataclasses import dataclass
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.models.files import as_object, read_object, shown


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """The head of a classification model.

    Args:
        num_classes: at least one.
        exclusive: exactly one class is right, so probabilities are a softmax; else sigmoids.
    """

    num_classes: int
    exclusive: bool


def read_classifier_head(directory: Path) -> ClassifierHead | None:
    """Return the classifier head, or None for a language model.

    Raises:
        ConfigError: the number of classes in config.json is not valid.
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
    """Return the architecture that config.json names; empty if it names none."""
    names = (read_object(directory / "config.json") or {}).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
