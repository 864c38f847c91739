"""The declaration of one setting."""

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    unset: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str = "",
    positional: bool = False,
    size: bool = False,
    added: tuple[str, float] | None = None,
    repeated: str = "",
) -> Any:
    """Return a configuration field with its default, help and range.

    `unset` describes the default None. A `size` is a number of bytes, and text may use KiB, MiB,
    GiB or TiB. `added` is another field's name and a number: None stands for their sum. `repeated`
    is a flag that may be given several times; its values are joined by commas, and the environment
    and the file have them so.
    """
    metadata = {
        "help": help,
        "unset": unset,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "metavar": metavar or ("" if choices else "N"),
        "positional": positional,
        "size": size,
        "added": added,
        "repeated": repeated,
    }
    return field(default=default, metadata=metadata)
