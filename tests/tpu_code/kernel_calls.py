"""Runs the grid of a Pallas call for `trips`, and sizes its memory."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_code.hlo import Where
from tpu_code.integers import known
from tpu_code.kernel_memory import Memory
from tpu_code.tally import padded_elements


def run_kernel(walk: Any, eqn: Any, inputs: list[Any], path: Where) -> None:
    """Run the kernel for each program of the grid; count the blocks that the pipeline copies."""
    mapping, kernel = eqn.params["grid_mapping"], walk.kernel
    of_index = mapping.num_index_operands
    scalars = [Memory(_small(one)) for one in inputs[:of_index]]
    operands = inputs[of_index : of_index + mapping.num_inputs]
    scratch = [Memory.empty(aval) for aval in mapping.scratch_avals]
    blocks: list[tuple[int, ...] | None] = [None] * len(mapping.block_mappings)
    walk.grid = tuple(int(size) for size in mapping.grid)
    for programs in itertools.product(*(range(size) for size in walk.grid)):
        walk.programs = programs
        kernel.programs += 1
        references = []
        for place, block in enumerate(mapping.block_mappings):
            at = _block_at(walk, block, programs, scalars, path)
            if _piped(block) and (at is None or at != blocks[place]):
                kernel.copied += _block_bytes(block)
            blocks[place] = at
            operand = operands[place] if place < len(operands) else None
            references.append(Memory(_cut(operand, block, at)))
        walk.run(eqn.params["jaxpr"], [], [*scalars, *references, *scratch], path)


def _small(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "iub" else None


def _block_at(
    walk: Any, block: Any, programs: tuple[int, ...], scalars: list[Memory], path: Where
) -> tuple[int, ...] | None:
    numbers = [np.int32(one) for one in programs]
    index = block.index_map_jaxpr
    found = walk.run(index.jaxpr, [None] * len(index.consts), [*numbers, *scalars], path)
    return None if any(one is None for one in found) else tuple(int(one) for one in found)


def _sizes(block: Any) -> tuple[int, ...]:
    """Return a block's size in each dimension of its array; one that is squeezed counts one."""
    sizes = (getattr(size, "block_size", size) for size in block.block_shape)
    return tuple(size if isinstance(size, int) else 1 for size in sizes)


def _piped(block: Any) -> bool:
    """Tell whether the pipeline copies the block; not where a kernel copies for itself."""
    return str(_space(block.transformed_block_aval)) not in ("any", "hbm", "semaphore_mem")


def _space(aval: Any) -> str:
    return str(getattr(aval, "memory_space", "default")).lower().rpartition(".")[2]


def _block_bytes(block: Any) -> int:
    return math.prod(_sizes(block)) * np.dtype(block.array_aval.dtype).itemsize


def _cut(operand: Any, block: Any, at: tuple[int, ...] | None) -> Any:
    """Return the block of an operand whose contents are known."""
    if _small(operand) is None or at is None:
        return None
    sizes = _sizes(block)
    found = np.asarray(operand)[
        tuple(slice(a * size, (a + 1) * size) for a, size in zip(at, sizes, strict=True))
    ]
    shape = block.transformed_block_aval.shape
    return found.reshape(shape) if found.size == math.prod(shape) and known(found) else None


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """Memory that a kernel declares; bytes."""

    name: str
    scalar: int  # SMEM: lists and numbers that are prefetched, and scratch
    vector: int  # VMEM: two of each block, and scratch
    estimated: bool  # has a `cost_estimate`, from which XLA schedules around it


def declared(jaxpr: Any) -> list[KernelMemory]:
    """Return the memory of each Pallas call of a program, in order."""
    return [_declared(eqn) for eqn in _calls(getattr(jaxpr, "jaxpr", jaxpr))]


def _calls(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _calls(inner)


def _declared(eqn: Any) -> KernelMemory:
    mapping, kernel = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    scalar = sum(_scalar_bytes(one.aval) for one in kernel.invars[: mapping.num_index_operands])
    vector = 0
    for block in mapping.block_mappings:
        space = _space(block.transformed_block_aval)
        if space == "smem":
            scalar += 2 * _scalar_bytes(block.transformed_block_aval)
        elif _piped(block):
            vector += 2 * _vector_bytes(block.transformed_block_aval)
    for aval in mapping.scratch_avals:
        space = _space(aval)
        scalar += _scalar_bytes(aval) if space == "smem" else 0
        vector += _vector_bytes(aval) if space == "vmem" else 0
    name = str(eqn.params.get("name") or kernel.debug_info.func_name)
    return KernelMemory(name, scalar, vector, eqn.params.get("cost_estimate") is not None)


def _scalar_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _vector_bytes(aval: Any) -> int:
    return padded_elements(aval.shape) * np.dtype(aval.dtype).itemsize
