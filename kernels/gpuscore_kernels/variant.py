"""`Variant`: one way to compile a Triton kernel, for `make check-kernels`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHES = (80, 89, 90, 120)


@dataclass(frozen=True, slots=True)
class LoopRule:
    """Demands on the generated code of a loop with a matrix product.

    Args:
        in_flight: the fewest groups of asynchronous copies that may still be under way when a
            product has waited for its own (the number of `ttg.async_wait`).
        awaited_loads: the most loads of an iteration that its own copies may wait for.
        tile_loads: tiles that are no factors of a product, and are loaded into registers.
    """

    in_flight: int
    awaited_loads: int = 0
    tile_loads: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which a kernel is launched.

    Args:
        name: of the variant, unique in its kernel's folder.
        kernel: the function decorated with `triton.jit`.
        signature: type of every argument by name ("*bf16", "i32", "fp32",
            "tensordesc<bf16[64, 128]>"); those in `constexprs` may be left out.
        constexprs: values of the compile-time arguments.
        divisible: arguments that are multiples of 16 (pointers: of 16 bytes) in every launch;
            otherwise loads are not vectorised.
        num_warps, num_stages: launch options.
        arches: compute capabilities times ten that it is shipped for.
        needs_wgmma: on sm_90 the code must contain wgmma instructions.
        loops: demands on every loop with a matrix product on tensor cores, by the loop's header as
            `ast.unparse` writes it, such as "for index in tl.range(begin, end)".
        stack: accepted bytes of stack by architecture; 0 for others.
        narrow: the most loads and stores of global memory of under 16 bytes; None = any number.
        quick: the architectures for which `make test-all` compiles it.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    arches: tuple[int, ...] = ARCHES
    needs_wgmma: bool = False
    loops: Mapping[str, LoopRule] = field(default_factory=dict)
    stack: Mapping[int, int] = field(default_factory=dict)
    narrow: int | None = None
    quick: tuple[int, ...] = ARCHES
