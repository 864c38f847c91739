"""`Card`: what a maker says of a card."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CARDS = Path(__file__).with_name("cards.toml")


@dataclass(frozen=True, slots=True)
class Card:
    """One row of `cards.toml`.

    Args:
        key: its name in the tables.
        name: its full name.
        arch: compute capability times ten.
        multiprocessors: number of them.
        clock_ghz: boost clock.
        flop_per_cycle: of one multiprocessor, in dense products of 16-bit numbers.
        memory_gb_s: bandwidth of the memory.
        source: of these figures.
        predicted: predictions are made for it.
        speed_of: key of the card whose measured share of the boost clock is used; "" = its own.
        memory_mib: that the card says it has; 0 = not looked up.
        link: key of what connects it to others of a machine (`links.Link`); "" = not looked up.
    """

    key: str
    name: str
    arch: int
    multiprocessors: int
    clock_ghz: float
    flop_per_cycle: int
    memory_gb_s: float
    source: str
    predicted: bool = False
    speed_of: str = ""
    memory_mib: int = 0
    link: str = ""

    @property
    def measured_as(self) -> str:
        """Key of the card whose products say how fast this one is."""
        return self.speed_of or self.key

    @property
    def tensor_cores(self) -> str:
        """Kind of matrix instruction: wgmma reads shared memory while the block goes on."""
        return "wgmma" if self.arch == 90 else "mma.sync"


def read_cards(path: Path = CARDS) -> Mapping[str, Card]:
    """Read the cards of a file by key."""
    with path.open("rb") as file:
        return {key: Card(key, **row) for key, row in tomllib.load(file).items()}
