"""Reasons why the code of a variant must not be shipped."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from gpuscore_kernels.variant import LoopRule, Variant
from kernel_code.facts import MULTIPROCESSORS, CodeFacts, LoopFacts

GROWTH = 1.1  # registers and issue slots may grow by less than a tenth
COPY_BYTES = 16  # the widest asynchronous copy of a thread; narrower ones need more issue slots

Row: TypeAlias = Mapping[str, Any]  # of a baseline, as `row` makes it


def row(facts: CodeFacts) -> dict[str, Any]:
    """Return the row of a baseline for a variant."""
    return {
        "registers": facts.registers,
        "stack": facts.stack,
        "shared": facts.shared,
        "resident": facts.resident,
        "loops": {loop.header: _loop_row(loop) for loop in facts.loops if loop.products},
    }


def _loop_row(loop: LoopFacts) -> dict[str, Any]:
    return {
        "in_flight": loop.in_flight,
        "awaited_loads": loop.awaited_loads,
        "issue": loop.issue,
        "products": loop.products,
        "mufu": loop.mufu,
        "loads": loop.loads,
        "copies": loop.copies,
    }


def complaints(variant: Variant, facts: CodeFacts, known: Row | None) -> list[str]:
    """Return the faults of a compiled variant; `known` is its row of the baseline."""
    listed = [*_resources(variant, facts)]
    for loop in facts.loops:
        if loop.products:
            rule = variant.loops.get(loop.header.split(" #")[0])
            listed += [
                f"{loop.header}: {bad}" for bad in _structure(variant, facts.arch, loop, rule)
            ]
    if known is None:
        return [*listed, f"no baseline for Triton {facts.triton}; write it with --update"]
    return [*listed, *_growth(facts, known)]


def _resources(variant: Variant, facts: CodeFacts) -> Iterator[str]:
    allowed, limit = variant.stack.get(facts.arch, 0), MULTIPROCESSORS[facts.arch].block_shared
    if facts.stack > allowed:
        yield f"{facts.stack} bytes of stack, allowed: {allowed}"
    if facts.shared > limit:
        yield f"{facts.shared} bytes of shared memory, the limit is {limit}"
    if variant.needs_wgmma and facts.arch == 90 and not facts.wgmma:
        yield "no wgmma instruction"
    if variant.narrow is not None and facts.accesses[1] > variant.narrow:
        yield f"{facts.accesses[1]} accesses of under 16 bytes, allowed: {variant.narrow}"


def _structure(
    variant: Variant, arch: int, loop: LoopFacts, rule: LoopRule | None
) -> Iterator[str]:
    """Yield faults in the code of a loop with a product."""
    if rule is None:
        yield f"has a product, but no rule in {variant.name!r}"
        return
    if loop.in_flight is None or loop.in_flight < rule.in_flight:
        waits = "no copies" if loop.in_flight is None else f"{loop.in_flight} groups of copies"
        yield f"{waits} in flight during a product, expected: {rule.in_flight}"
    if loop.awaited_loads > rule.awaited_loads:
        yield (
            f"copies wait for {loop.awaited_loads} loads of their own iteration, allowed: "
            f"{rule.awaited_loads}"
        )
    if loop.tile_loads > rule.tile_loads:
        yield f"{loop.tile_loads} tiles are loaded into registers, not copied"
    if loop.copy_bytes != COPY_BYTES:
        yield f"copies of {loop.copy_bytes} bytes, expected: {COPY_BYTES}"
    if variant.needs_wgmma and arch == 90 and (loop.mma or not loop.wgmma):
        yield f"{loop.wgmma} wgmma and {loop.mma} mma instructions, expected: wgmma only"
    if loop.spills and not variant.stack.get(arch):
        yield f"{loop.spills} loads and stores of spilled registers"


def _growth(facts: CodeFacts, known: Row) -> Iterator[str]:
    """Yield the numbers that have become worse than in the baseline."""
    if facts.registers > known["registers"] * GROWTH:
        yield f"{facts.registers} registers, {known['registers']} before"
    if facts.shared > known["shared"]:
        yield f"{facts.shared} bytes of shared memory, {known['shared']} before"
    if facts.resident < known["resident"]:
        yield f"{facts.resident} blocks per multiprocessor, {known['resident']} before"
    loops = {loop.header: loop for loop in facts.loops if loop.products}
    for header in loops.keys() ^ known["loops"].keys():
        yield f"{header}: {'no product any more' if header in known['loops'] else 'not known'}"
    for header in sorted(loops.keys() & known["loops"].keys()):
        yield from (
            f"{header}: {bad}" for bad in _loop_growth(loops[header], known["loops"][header])
        )


def _loop_growth(loop: LoopFacts, known: Mapping[str, Any]) -> Iterator[str]:
    if (loop.in_flight or 0) < (known["in_flight"] or 0):
        yield f"{loop.in_flight} groups of copies in flight, {known['in_flight']} before"
    if loop.issue > known["issue"] * GROWTH:
        yield f"{loop.issue} issue slots, {known['issue']} before"
    for name in ("awaited_loads", "products", "mufu", "loads", "copies"):
        if getattr(loop, name) > known[name]:
            yield f"{name}: {getattr(loop, name)}, {known[name]} before"
