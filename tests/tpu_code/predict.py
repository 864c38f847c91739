"""Predicts the time of a request on a chip from the compiled programs and the trips of their loops.

Three numbers, none of them measured:

- floor: each instruction takes the longer of its products at the peak rate and its bytes at the
  peak bandwidth, and a kernel the longest of products, vector operations and copies;
- XLA: the compiler's own estimate of cycles for its instructions; a kernel, of which it has none,
  takes the sum of the three;
- products: the matrix products alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpu_code.chips import Chip
from tpu_code.hlo import Frames, Where
from tpu_code.tally import Kernel, Tally
from tpu_code.work import Place

GOAL = 5000  # items per second of 2,000 + 500 x 20 for Qwen3-0.6B on one v6e


@dataclass
class Part:
    """Seconds of a loop's own instructions, of all its runs; or of a kernel's calls."""

    name: str
    runs: int
    floor: float
    estimate: float
    products: float
    costly: tuple[tuple[str, float], ...] = ()  # its slowest instructions, with their seconds


@dataclass
class Prediction:
    """Times of a request, in seconds."""

    parts: list[Part] = field(default_factory=list)

    @property
    def floor(self) -> float:
        return sum(part.floor for part in self.parts)

    @property
    def estimate(self) -> float:
        return sum(part.estimate for part in self.parts)

    @property
    def products(self) -> float:
        return sum(part.products for part in self.parts)


class NoTrips(Exception):
    """A loop of the compiled program is in no loop of the traced one, or the other way round."""


def predict(work: Sequence[Place], tally: Tally, chip: Chip) -> Prediction:
    """Predict the time of one program for one batch.

    Raises:
        NoTrips: it is not known how often a loop runs.
    """
    found = Prediction()
    for place in work:
        runs = trips(place, tally)
        found.parts.append(
            Part(
                _named(place),
                runs,
                place.seconds * runs,
                place.cycles * runs / chip.clock,
                place.product_seconds * runs,
                tuple((name, cycles * runs / chip.clock) for name, cycles in place.costly),
            )
        )
    for name, kernel in tally.kernels.items():
        found.parts.append(kernel_part(name, kernel, chip))
    return found


def kernel_part(name: str, kernel: Kernel, chip: Chip) -> Part:
    times = kernel_times(kernel, chip)
    useful = sum(one.operations * count for one, count in kernel.products.items()) / chip.bf16
    return Part(f"kernel {name}", kernel.calls, max(times.values()), sum(times.values()), useful)


def kernel_times(kernel: Kernel, chip: Chip) -> dict[str, float]:
    """Return the seconds that a kernel keeps each unit busy."""
    products = sum(one.padded(chip.matrix_side) * n for one, n in kernel.products.items())
    lanes = kernel.lanes / chip.lane_operations
    return {
        "products": products / chip.bf16,
        "vectors": max(lanes, kernel.transcendental / chip.exponentials),
        "copies": kernel.copied / chip.bandwidth,
    }


def trips(place: Place, tally: Tally) -> int:
    """Return how often a place ran: by its place in our source."""
    if not place.where.frames:
        return 1
    wanted, branches = place.where, tally.branches
    known: Mapping[Where, int] = tally.loops
    if place.branch is not None:
        known = {path: count for (path, taken), count in branches.items() if taken == place.branch}
        if any(_same(wanted, path) for path, _ in branches) and not _fitting(wanted, known):
            return 0  # a branch that the batch never takes
    if fitting := _fitting(wanted, known):
        return known[max(fitting, key=lambda path: len(path.frames))]
    # A loop inside of one that never ran was not reached.
    around = (wanted.frames[start:] for start in range(1, len(wanted.frames)))
    never = [path.frames for path, count in tally.loops.items() if not count]
    if any(_starts(frames, path) for frames in around for path in never):
        return 0
    raise NoTrips(f"{_named(place)}: it is not known how often it runs")


def _fitting(wanted: Where, known: Mapping[Where, int]) -> list[Where]:
    return [path for path in known if _same(wanted, path)]


def _same(wanted: Where, path: Where) -> bool:
    return _starts(wanted.frames, path.frames) and wanted.turns == path.turns


def _starts(wanted: Frames, path: Frames) -> bool:
    return wanted[: len(path)] == path


def _named(place: Place) -> str:
    names = [name.rpartition(".")[2] for name, _ in place.where.frames]
    said = " < ".join(names[:3]) or "outside of loops"
    said += "".join(f" #{turn + 1}" for turn in place.where.turns)
    return said if place.branch is None else f"{said}, branch {place.branch}"
