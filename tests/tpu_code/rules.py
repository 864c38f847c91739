"""Reasons why a compiled program must not be shipped."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tpu_code.chips import Chip
from tpu_code.facts import Facts

Row: TypeAlias = Mapping[str, Any]  # of the baseline, as `row` makes it
GROWTH = 1.1  # memory and the cycles of a part of the code may grow by less than a tenth
SPARE = 1.01  # of weights: tiles pad norms and biases
SMALL = 2**20  # bytes of temporaries and code below which growth does not matter


@dataclass(frozen=True, slots=True)
class Planned:
    """Figures of the plan that a program is held to; bytes."""

    weights: int
    pages: int  # all of them
    batch: int  # that the plan leaves to the largest batch
    tied: bool  # the head is the embedding, which is passed twice and exists once


def row(facts: Facts) -> dict[str, Any]:
    """Return what the baseline holds of a program."""
    return {
        "batch_bytes": facts.batch_bytes,
        "layer": dict(facts.layer),
        "outside": dict(facts.outside),
        "cycles": facts.cycles,
        "kernels": [
            {"name": kernel.declared.name, "smem": kernel.declared.scalar, "vmem": kernel.taken}
            for kernel in facts.kernels
        ],
    }


def complaints(
    facts: Facts, planned: Planned, chip: Chip, known: Row | None, *, extends: bool
) -> list[str]:
    """Return what is wrong with a program; `known` is its row of the baseline."""
    complaints = [*_memory(facts, planned, chip), *_kernels(facts, chip)]
    if extends:
        complaints += _pages(facts, planned)
    if known is None:
        return [*complaints, "no baseline; write it with --update"]
    return [*complaints, *_growth(facts, known)]


def _memory(facts: Facts, planned: Planned, chip: Chip) -> Iterator[str]:
    padded = sum(argument.padded for argument in facts.arguments)
    if padded != facts.argument_bytes:
        yield f"arguments of {padded} bytes are read from the code, XLA says {facts.argument_bytes}"
    weights = sum(
        array.padded
        for array in facts.part("weights")
        if not (planned.tied and array.name == "weights.lm_head")
    )
    if weights > planned.weights * SPARE:
        yield f"weights take {weights} bytes, the plan counts {planned.weights}"
    if facts.batch_bytes > planned.batch:
        yield f"a batch takes {facts.batch_bytes} bytes, the plan leaves {planned.batch}"
    whole = weights + planned.pages + facts.batch_bytes
    if whole > chip.hbm:
        yield f"weights, pages and batch take {whole} bytes, {chip.name} has {chip.hbm}"


def _pages(facts: Facts, planned: Planned) -> Iterator[str]:
    pool = facts.part("pool")
    if not pool:
        yield "the program has no argument called pool"
        return
    size = sum(array.padded for array in pool)
    if size > planned.pages:
        share = 100 * (size / planned.pages - 1)
        yield f"padding: pages take {size} bytes, {share:.0f} % more than the plan counts"
    for array in pool:
        if not array.aliased:
            yield f"{array.name} is not updated in place: no output has its memory"
    if facts.aliased < size:
        yield f"outputs take {facts.aliased} bytes of arguments' memory, the pages are {size}"
    yield from (f"a copy of the pages: {copy}" for copy in facts.copies)
    if facts.layer["scatter"]:
        yield (
            f"{facts.layer['scatter']} scatters in a layer: pages are written row by row, which "
            "is slow on a TPU"
        )


def _kernels(facts: Facts, chip: Chip) -> Iterator[str]:
    for kernel in facts.kernels:
        name = f"kernel {kernel.declared.name}"
        if kernel.declared.scalar > chip.scalar_memory:
            taken = kernel.declared.scalar
            yield f"{name}: {taken} bytes of SMEM, {chip.name} has {chip.scalar_memory}"
        if max(kernel.declared.vector, kernel.taken) > chip.vector_memory:
            taken = max(kernel.declared.vector, kernel.taken)
            yield f"{name}: {taken} bytes of VMEM, {chip.name} has {chip.vector_memory}"
        if not kernel.declared.estimated:
            yield f"{name}: no cost_estimate, without which XLA schedules copies blindly"


def _growth(facts: Facts, known: Row) -> Iterator[str]:
    """Yield what has become worse than in the baseline."""
    now = row(facts)
    if facts.batch_bytes > max(known["batch_bytes"] * GROWTH, known["batch_bytes"] + SMALL):
        yield f"a batch takes {facts.batch_bytes} bytes, {known['batch_bytes']} before"
    if now["cycles"] > known["cycles"] * GROWTH:
        yield f"{now['cycles']} cycles of all code, run once, {known['cycles']} before"
    for part in ("layer", "outside"):
        for opcode, count in now[part].items():
            if count > known[part].get(opcode, 0):
                yield f"{part}: {count} of {opcode}, {known[part].get(opcode, 0)} before"
    if (had := len(known["kernels"])) != len(now["kernels"]):
        yield f"{len(now['kernels'])} kernels, {had} before"
        return
    for kernel, before in zip(now["kernels"], known["kernels"], strict=True):
        for memory in ("smem", "vmem"):
            if kernel[memory] > before[memory] * GROWTH:
                yield (
                    f"kernel {kernel['name']}: {kernel[memory]} bytes of {memory.upper()}, "
                    f"{before[memory]} before"
                )
