"""Labels of a classification model, which are the names of its classes."""

from collections.abc import Sequence

from gpuscore.errors import InvalidRequest


def class_ids(labels: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the number of the class that each label names exactly.

    Raises:
        InvalidRequest: a label is the name of no class, or of several.
    """
    for index, label in enumerate(labels):
        count = classes.count(label)
        if count != 1:
            named = f"{count} of" if count else "none of"
            remedy = "; send label_token_ids, the numbers of classes" if count else ""
            raise InvalidRequest(
                f"labels[{index}] is the name of {named} the model's {len(classes)} "
                f"classes{remedy}",
                param=f"labels[{index}]",
            )
    return [classes.index(label) for label in labels]
