"""The plan of memory of several models, which `gpuscore info` prints."""

from collections.abc import Sequence

from gpuscore.backends.common.plan import mebibytes
from gpuscore.config import EngineConfig
from gpuscore.config.served import ServedConfig
from gpuscore.hub import model_directory
from gpuscore.replicas.placement import Placement
from gpuscore.replicas.shares import Needs, Sought, ask_needs, places_of_all

HEAD: tuple[str, ...] = ("model", "device", "cores", "weights", "one longest prompt", "most memory")


def shares_table(chosen: Sequence[ServedConfig], engine: EngineConfig) -> str:
    """Return a row for each engine: where it runs, what it needs and what it may take.

    Raises:
        ConfigError: as `places_of_all`.
    """
    sought = [
        Sought(one.name, model_directory(one.config.model, one.config.revision), one.config)
        for one in chosen
    ]
    asked: dict[str, list[Needs]] = {}

    def ask(models: Sequence[Sought], place: Placement) -> list[Needs]:
        asked[place.device] = ask_needs(models, place)
        return asked[place.device]

    rows = [HEAD]
    for number, places in enumerate(places_of_all(sought, engine.devices, ask)):
        rows += [_row(sought[number].name, place, asked[place.device][number]) for place in places]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(name: str, place: Placement, needs: Needs) -> tuple[str, ...]:
    return (
        name,
        place.device if place.device != "auto" else needs.kind,
        ", ".join(map(str, place.cores)) or "all",
        mebibytes(needs.weights),
        mebibytes(needs.prompt),
        mebibytes(place.model.memory_limit or 0),
    )
