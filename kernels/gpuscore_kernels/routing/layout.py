"""Result type of `route`."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a batch's rows, with their weights.

    Every choice of a row, of which there are k, has a *place*: the places of expert 0 come first,
    then those of expert 1, and so on, each expert's in the order of rows. All shapes follow from
    the number of rows, whatever experts they chose.
    """

    weights: Tensor  # float [T, k]; 0 in rows of padding
    places: Tensor  # int32 [T, k]; -1 in rows of padding
    rows: Tensor  # int32 [T * k]: the row of each place; after the last place anything
    starts: Tensor  # int32 [experts + 1]: the first place of each expert, then the number of places
