"""Memory that the Pallas calls of a traced program declare."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

LANES, SUBLANES = 128, 8


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


def _calls(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
            continue
        for value in eqn.params.values():
            for element in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(element, "jaxpr", element)
                if hasattr(inner, "eqns"):
                    yield from _calls(inner)


def _declared(eqn: Any) -> KernelMemory:
    mapping, kernel = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    scalar = sum(
        _scalar_bytes(variable.aval) for variable in kernel.invars[: mapping.num_index_operands]
    )
    vector = 0
    for block in mapping.block_mappings:
        space = _space(block.transformed_block_aval)
        if space == "smem":
            scalar += 2 * _scalar_bytes(block.transformed_block_aval)
        elif space not in ("any", "hbm", "semaphore_mem"):  # those a kernel copies for itself
            vector += 2 * _vector_bytes(block.transformed_block_aval)
    for aval in mapping.scratch_avals:
        space = _space(aval)
        scalar += _scalar_bytes(aval) if space == "smem" else 0
        vector += _vector_bytes(aval) if space == "vmem" else 0
    name = str(eqn.params.get("name") or kernel.debug_info.func_name)
    return KernelMemory(name, scalar, vector, eqn.params.get("cost_estimate") is not None)


def _space(aval: Any) -> str:
    return str(getattr(aval, "memory_space", "default")).lower().rpartition(".")[2]


def _scalar_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def _vector_bytes(aval: Any) -> int:
    return _padded_elements(aval.shape) * np.dtype(aval.dtype).itemsize


def _padded_elements(shape: tuple[int, ...]) -> int:
    """Elements of whole registers: the last two dimensions are padded to 8 x 128."""
    if not shape:
        return 0  # the scalar unit's
    *outer, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    padded = -(-rows // SUBLANES) * SUBLANES * (-(-lanes // LANES) * LANES)
    return math.prod(outer) * padded
