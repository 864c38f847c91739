"""Operations of a kernel before it waits for the kernel before it (programmatic dependent launch).

The wait is griddepcontrol.wait in PTX and ACQBULK in machine code. It has to stand in the code's
first block, which every thread executes, before anything that touches global memory and before the
signal that lets the next kernel begin (griddepcontrol.launch_dependents, PREEXIT).
"""

import re
from collections.abc import Iterator

from gpuscore_kernels.generated.sass import Listing

_LEAVES = re.compile(r"\$L__BB\d+_\d+:|(@!?%p\d+ )?(bra|brx|call|ret|exit)\b")
_TOUCHES = re.compile(
    r"(@!?%p\d+ )?(ld|st|atom|red|multimem|prefetch|prefetchu|discard|applypriority|cp\.async"
    r"|cp\.reduce|griddepcontrol\.launch_dependents)\b(?!\.(commit|wait))"
)
# Other memories; an operation that names global memory as well is a copy between the two.
_ELSEWHERE = re.compile(r"\.(param|shared|const|local)\b")
_OPCODES = ("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "CCTL", "PREEXIT")
_ENDS = ("EXIT", "RET", "BRA", "BRX", "CALL", "JMP", "BPT")
_BULK = ("UBLK", "UTMA")  # copies by the tensor memory accelerator


def ptx_before_wait(ptx: str) -> int | None:
    """Number of such operations before the wait; None if the first block has no wait."""
    return _before_wait(_ptx_operations(ptx), "griddepcontrol.wait")


def sass_before_wait(listing: Listing) -> int | None:
    """The same of the machine code."""
    return _before_wait(_sass_operations(listing), "ACQBULK")


def worse(one: int | None, other: int | None) -> int | None:
    """Return the larger number; None if one of them is."""
    return None if one is None or other is None else max(one, other)


def _before_wait(operations: Iterator[str], wait: str) -> int | None:
    for number, operation in enumerate(operations):
        if operation == wait:
            return number
    return None


def _ptx_operations(ptx: str) -> Iterator[str]:
    """Yield the first block's waits, and its operations that touch global memory or signal."""
    _, _, body = ptx.partition(".entry ")
    _, _, body = body.partition("{")
    for line in map(str.strip, body.splitlines()):
        if _LEAVES.match(line):
            return
        if line.startswith("griddepcontrol.wait"):
            yield "griddepcontrol.wait"
        elif _TOUCHES.match(line) and (".global" in line or not _ELSEWHERE.search(line)):
            yield line


def _sass_operations(listing: Listing) -> Iterator[str]:
    targets = set(listing.labels.values()) - {0}
    for number, one in enumerate(listing.instructions):
        if number in targets or one.target is not None or one.opcode.startswith(_ENDS):
            return
        name = one.opcode.split(".")[0]
        if name == "ACQBULK" or name in _OPCODES or name.startswith(_BULK):
            yield name
