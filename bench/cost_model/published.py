"""Published measurements: reading them, and dividing them into two halves.

The rule of division is fixed: within each kind of kernel, in the order of card, source, kernel and
sizes, every other measurement is for calibration, and the rest is held out.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

PUBLISHED = Path(__file__).with_name("published.toml")
SHORTEST_US = 20.0  # shorter measurements are left out, see published.toml


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """Division of a published attention kernel's work; see `published.toml`."""

    rows: int
    keys: int
    warps: int
    in_flight: int = 1
    all_masked: bool = False
    more_per_score: float = 0


@dataclass(frozen=True, slots=True, order=True)
class Attention:
    """Self-attention of `batch` sequences of `tokens`, as FlashAttention computes it."""

    dim: int
    causal: bool
    heads: int
    batch: int
    tokens: int
    tile: Tile

    @property
    def flop(self) -> float:
        """Operations as publications count them."""
        pairs = self.batch * self.heads * self.tokens**2 / (2 if self.causal else 1)
        return 4 * self.dim * pairs


@dataclass(frozen=True, slots=True, order=True)
class Product:
    """A product [rows, inner] x [inner, columns] of 16-bit numbers."""

    rows: int
    columns: int
    inner: int

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner

    @property
    def bytes(self) -> float:
        """Bytes that are read and written at least."""
        sides = self.rows * self.inner + self.columns * self.inner + self.rows * self.columns
        return 2.0 * sides


@dataclass(frozen=True, slots=True, order=True)
class Rowwise:
    """A kernel that reads and writes memory once, and computes little."""

    bytes: float


Work: TypeAlias = Attention | Product | Rowwise
KINDS: Mapping[type, str] = {Attention: "attention", Product: "product", Rowwise: "rowwise"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One published time."""

    card: str
    work: Work
    us: float
    kernel: str
    source: str

    @property
    def kind(self) -> str:
        return KINDS[type(self.work)]

    @property
    def series(self) -> tuple[str, str]:
        return self.source, self.kernel


def read_published(path: Path = PUBLISHED) -> list[Measurement]:
    """Read all measurements that are long enough, in the order that divides them."""
    with path.open("rb") as file:
        rows = tomllib.load(file)["series"]
    found = [one for row in rows for one in _measurements(row) if one.us >= SHORTEST_US]
    return sorted(found, key=_order)


def halves(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Return the measurements to calibrate with, and those that are held out."""
    calibration: list[Measurement] = []
    held_out: list[Measurement] = []
    for kind in KINDS.values():
        of_kind = sorted((one for one in measurements if one.kind == kind), key=_order)
        calibration += of_kind[0::2]
        held_out += of_kind[1::2]
    return calibration, held_out


def _order(one: Measurement) -> tuple[Any, ...]:
    return one.kind, one.card, one.source, one.kernel, one.work, one.us


def _measurements(row: Mapping[str, Any]) -> Iterator[Measurement]:
    """Yield the points of one series."""
    for *sizes, value in row["points"]:
        work = _work(row, sizes)
        us = _microseconds(work, value, row["unit"])
        yield Measurement(row["card"], work, us, row["kernel"], row["source"])


def _work(row: Mapping[str, Any], sizes: Sequence[int]) -> Work:
    if row["kind"] == "product":
        return Product(*sizes)
    if row["kind"] == "rowwise":
        return Rowwise(*sizes)
    (tokens,) = sizes
    batch = row["batch"] if "batch" in row else row["tokens"] // tokens
    tile = Tile(
        *row["tile"],
        in_flight=row.get("in_flight", 1),
        all_masked=row.get("all_masked", False),
        more_per_score=row.get("more_per_score", 0),
    )
    return Attention(row["dim"], row["causal"], row["heads"], batch, tokens, tile)


def _microseconds(work: Work, value: float, unit: str) -> float:
    """Convert a value; raises ValueError for an unknown unit, or a rate of a row-wise kernel."""
    if unit == "us":
        return value
    if unit == "ms":
        return 1e3 * value
    if unit == "TFLOP/s" and not isinstance(work, Rowwise):
        return work.flop / value / 1e6
    raise ValueError(f"{unit!r} of {work}: supported are us, ms, and TFLOP/s with operations")
