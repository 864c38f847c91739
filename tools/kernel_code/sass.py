"""Loops of a kernel's machine code, from nvdisasm's listing.

A loop is a natural loop: a branch back to a block that every way to the branch goes through. A
branch back alone would not do, because rare code (a warp that has diverged) stands behind the
kernel and jumps back into it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_WAIT = re.compile(r"\s*SB0, 0x([0-9a-f]+)")
BYTES = 16  # of an instruction, on all architectures here
_ENDS = ("EXIT", "RET", "BPT")
# ptxas leaves some loops by a call that never returns, as if it were a branch.
_BRANCHES = ("BRA", "CALL.REL.NOINC")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `target` is the label that it may branch to."""

    opcode: str
    operands: str
    guarded: bool  # executed only where a predicate holds
    target: str | None

    @property
    def falls_through(self) -> bool:
        """The next instruction may follow."""
        if self.opcode.startswith(_ENDS):
            return self.guarded
        if self.opcode in ("BRA", "BRA.U"):
            # BRA P1, `(.L_x_3) and BRA.U UP0, `(.L_x_3) are conditional too.
            return self.guarded or not self.operands.strip().startswith("`(")
        return True


@dataclass(frozen=True, slots=True)
class Listing:
    """A kernel's instructions, and the index of the instruction that each label stands before."""

    instructions: Sequence[Instruction]
    labels: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SassLoop:
    """One loop. `opcodes` counts its own instructions, not the instructions of loops inside it.

    `in_flight` is the fewest groups of asynchronous copies that a wait leaves under way.
    """

    nesting: int
    opcodes: Mapping[str, int]
    in_flight: int | None


def read_listing(text: str) -> Listing:
    """Read the one kernel of a listing of `nvdisasm -c`.

    Raises:
        ValueError: an instruction is missing or cannot be read.
    """
    instructions: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif label := _INSTRUCTION.match(line):
            if int(label[1], 16) != BYTES * len(instructions):
                raise ValueError(
                    f"instruction {len(instructions)} is missing before {line.strip()}"
                )
            target = _TARGET.search(label[4]) if label[3].startswith(_BRANCHES) else None
            opcode, guard = label[3].rstrip("."), label[2] is not None
            instructions.append(Instruction(opcode, label[4], guard, target and target[1]))
    if not instructions:
        raise ValueError("nvdisasm lists no instruction")
    return Listing(instructions, labels)


def read_loops(listing: Listing) -> tuple[list[SassLoop], Mapping[str, int]]:
    """Return the loops in the order of their code, and the opcodes outside of all loops."""
    blocks = _blocks(listing)
    bodies = _bodies(blocks)
    own: dict[int, list[Instruction]] = {start: [] for start in bodies}
    rest: list[Instruction] = []
    for start, (end, _) in blocks.items():
        around = [head for head, body in bodies.items() if start in body]
        inner = min(around, key=lambda head: len(bodies[head]), default=None)
        (rest if inner is None else own[inner]).extend(listing.instructions[start:end])
    loops = [
        SassLoop(
            nesting=sum(head in body for body in bodies.values()) - 1,
            opcodes=_counted(own[head]),
            in_flight=_in_flight(own[head]),
        )
        for head in sorted(bodies)
    ]
    return loops, _counted(rest)


def _counted(instructions: Sequence[Instruction]) -> dict[str, int]:
    return dict(sorted(Counter(instruction.opcode for instruction in instructions).items()))


def _in_flight(instructions: Sequence[Instruction]) -> int | None:
    """Fewest groups left under way; DEPBAR.LE on scoreboard 0 waits for LDGDEPBAR."""
    depths = [
        int(wait[1], 16)
        for instruction in instructions
        if instruction.opcode == "DEPBAR.LE" and (wait := _WAIT.match(instruction.operands))
    ]
    return min(depths, default=None)


def _blocks(listing: Listing) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Basic blocks that can be reached, by first instruction: their end, and what may follow."""
    code, labels = listing.instructions, listing.labels
    after = {
        i + 1
        for i, instruction in enumerate(code)
        if instruction.target or not instruction.falls_through
    }
    starts = sorted(({0} | set(labels.values()) | after) - {len(code)})
    blocks = {}
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        last = code[end - 1]
        follow = {labels[last.target]} if last.target else set()
        if last.falls_through and end < len(code):
            follow.add(end)
        blocks[start] = (end, tuple(sorted(follow)))
    return _reachable(blocks)


def _reachable(
    blocks: Mapping[int, tuple[int, tuple[int, ...]]],
) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Leave out the trap behind the kernel's end, which branches to itself, and padding."""
    reached, left = set(), [0]
    while left:
        block = left.pop()
        if block not in reached:
            reached.add(block)
            left.extend(blocks[block][1])
    return {start: block for start, block in blocks.items() if start in reached}


def _bodies(blocks: Mapping[int, tuple[int, tuple[int, ...]]]) -> dict[int, set[int]]:
    """Blocks of each loop, by its head."""
    before: dict[int, list[int]] = {start: [] for start in blocks}
    for start, (_, follow) in blocks.items():
        for other in follow:
            before[other].append(start)
    dominators = _dominators(blocks, before)
    bodies: dict[int, set[int]] = {}
    for start, head in _edges(blocks):
        if head in dominators[start]:
            bodies.setdefault(head, {head}).update(_reaching(start, head, before))
    return bodies


def _edges(blocks: Mapping[int, tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, int]]:
    for start, (_, follow) in blocks.items():
        for other in follow:
            yield start, other


def _reaching(start: int, head: int, before: Mapping[int, list[int]]) -> set[int]:
    """Blocks from which `start` is reached without going through `head`."""
    reached, left = {head}, [start]
    while left:
        block = left.pop()
        if block not in reached:
            reached.add(block)
            left.extend(before[block])
    return reached


def _dominators(
    blocks: Mapping[int, tuple[int, tuple[int, ...]]], before: Mapping[int, list[int]]
) -> dict[int, set[int]]:
    """Blocks that every way from the start to a block goes through, itself included."""
    dominators = {start: set(blocks) for start in blocks}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for start in blocks:
            if start == 0:
                continue
            new = reduce(set.intersection, (dominators[other] for other in before[start])) | {start}
            changed |= new != dominators[start]
            dominators[start] = new
    return dominators
