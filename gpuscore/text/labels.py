"""Labels that are texts."""

from gpuscore.arrays import Int32Array
from gpuscore.errors import LabelNotSingleToken

SHOWN_IDS = 16  # ids in an error message


def single_token(tokens: Int32Array, param: str) -> int:
    """Return a label's only token; raise LabelNotSingleToken, which shows its tokens."""
    if len(tokens) == 1:
        return int(tokens[0])
    more = "" if len(tokens) <= SHOWN_IDS else ", ..."
    shown = ", ".join(map(str, tokens[:SHOWN_IDS].tolist())) + more
    raise LabelNotSingleToken(
        f"{param} is {len(tokens)} tokens ([{shown}]), it must be exactly one", param=param
    )
