"""Promise: facts of generated code are read as they stand in it, and a loop that has become worse
is refused."""

import importlib.util
import re
from dataclasses import replace

import pytest

from gpuscore_kernels.variant import ARCHES, LoopRule, Variant
from kernel_code.compiled import joined
from kernel_code.facts import (
    MULTIPROCESSORS,
    CodeFacts,
    LoopFacts,
    resident_blocks,
)
from kernel_code.rules import complaints, row
from kernel_code.sass import read_listing, read_loops
from kernel_code.ttgir import read_ir_loops

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux"
)


def listing(*lines):
    """Return a listing of nvdisasm; labels end with a colon."""
    text, address = [], 0
    for line in lines:
        text.append(line if line.endswith(":") else f"        /*{address:04x}*/  {line} ;")
        address += 0 if line.endswith(":") else 16
    return "\n".join(text)


NESTED = listing(
    "S2R R0, SR_TID.X",
    ".L_x_0:",
    "MUFU.EX2 R1, R1",
    ".L_x_1:",
    "DEPBAR.LE SB0, 0x2",
    "HMMA.16816.F32.BF16 R4, R8, R12, R4",
    "@P1 BRA `(.L_x_4)",
    ".L_x_2:",
    "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
    "DEPBAR.LE SB0, 0x1",
    "@!P0 CALL.REL.NOINC `(.L_x_5)",
    "BRA `(.L_x_1)",
    ".L_x_5:",
    "IMAD.MOV.U32 R1, RZ, RZ, R2",
    "@!P2 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_4:",
    "WARPSYNC R1",
    "BRA `(.L_x_2)",
    ".L_x_3:",
    "BRA `(.L_x_3)",
    "NOP",
)


def test_loops_of_the_machine_code():
    """Rare code behind the end belongs to the loop that it comes from and is no loop itself; a loop
    may end with a call that does not return."""
    loops, rest = read_loops(read_listing(NESTED))
    outer, inner = loops
    assert (outer.nesting, inner.nesting) == (0, 1)
    assert outer.opcodes == {"MUFU.EX2": 1, "IMAD.MOV.U32": 1, "BRA": 1}
    assert inner.opcodes["HMMA.16816.F32.BF16"] == inner.opcodes["WARPSYNC"] == 1
    assert sum(inner.opcodes.values()) == 9
    assert (outer.in_flight, inner.in_flight) == (None, 1)
    assert rest == {"S2R": 1, "EXIT": 1}


def test_a_missing_instruction_is_an_error():
    text = NESTED.splitlines()
    with pytest.raises(ValueError, match="instruction 3 is missing"):
        read_listing("\n".join(line for line in text if "HMMA" not in line))
    with pytest.raises(ValueError, match="no instruction"):
        read_listing("")


IR = """#loc = loc("FILE":1:0)
#loc1 = loc("FILE":3:9)
#loc2 = loc("FILE":8:5)
#loc3 = loc("x"(#loc1))
#loc4 = loc(callsite(#loc3 at #loc2))
    %acc:2 = scf.for %i = %c0 to %n step %c1 iter_args(%a = %b, %next = %first) -> (i32)  : i32 {
      %0 = ttg.async_wait %t {num = 2 : i32} loc(#loc1)
      %1 = tt.dot %q, %k, %a : tensor<64x32xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma}>>
      %slot = tt.load %p : !tt.ptr<i32> loc(#loc1)
      %where = arith.addi %base, %NEEDED : i32 loc(#loc1)
      %ptr = tt.addptr %keys, %where : tensor<64x32x!tt.ptr<bf16>, #blocked> loc(#loc1)
      %2 = ttg.async_copy_global_to_local %ptr, %m {contiguity = 8 : i32} : tensor<64x32x!tt.ptr<bf16>, #blocked> -> <64x32xbf16> loc(#loc1)
      %3 = ttg.async_commit_group tokens %2 loc(#loc1)
      scf.yield %1, %slot : i32, i32 loc(#loc1)
    } loc(#loc4)
"""  # noqa: E501
SOURCE = """def helper(x):
    for index in tl.range(a, b):
        x += index
    return x

def kernel(x):
    if x:
        return helper(x)
"""


def test_loops_of_tritons_dialect(tmp_path):
    (tmp_path / "kernel.py").write_text(SOURCE)
    text = IR.replace("FILE", str(tmp_path / "kernel.py"))
    (carried,) = read_ir_loops(text.replace("%NEEDED", "%next"))
    assert carried.header == "for index in tl.range(a, b)"
    assert (carried.products, carried.in_flight, carried.groups) == (1, 2, 1)
    assert (carried.copy_bytes, carried.awaited_loads, carried.tile_loads) == (16, 0, 0)
    (waiting,) = read_ir_loops(text.replace("%NEEDED", "%slot"))
    assert waiting.awaited_loads == 1
    loops = read_ir_loops(text + text.split("#loc4 = ")[1].partition("\n")[2])
    assert [loop.header for loop in loops] == [carried.header, f"{carried.header} #2"]


def test_the_two_views_of_a_loop_must_agree(tmp_path):
    (tmp_path / "kernel.py").write_text(SOURCE)
    ir = read_ir_loops(IR.replace("FILE", str(tmp_path / "kernel.py")))
    loops, _ = read_loops(read_listing(NESTED))
    with pytest.raises(ValueError, match="until 2 groups .* machine code until 1"):
        list(joined(ir, loops))
    with pytest.raises(ValueError, match="0 loops with products became 1"):
        list(joined([], loops))
    (loop,) = list(joined([replace(ir[0], in_flight=1)], loops))[1:]
    assert loop.header == "for index in tl.range(a, b)"
    assert (loop.products, loop.copies, loop.mufu) == (1, 1, 0)


def test_resident_blocks():
    """Limits by registers (in units of 8 per thread), shared memory, warps and blocks in turn."""
    assert resident_blocks(90, 8, 206, 131072) == 1
    assert resident_blocks(90, 8, 128, 49152) == 2
    assert resident_blocks(90, 8, 129, 0) == 1
    assert resident_blocks(90, 4, 64, 0) == 8
    assert resident_blocks(89, 4, 40, 0) == 12
    assert resident_blocks(90, 1, 16, 0) == 32
    assert resident_blocks(90, 4, 64, 76 * 1024 - 1024) == 3
    for arch, limits in MULTIPROCESSORS.items():
        assert resident_blocks(arch, 4, 64, limits.block_shared) == 1
        assert resident_blocks(arch, 4, 64, limits.block_shared + 1) == 0
    assert set(MULTIPROCESSORS) == set(ARCHES)


HEADER = "for index in tl.range(a, b)"
OPCODES = {"HGMMA.64x64x16.F32.BF16": 8, "MUFU.EX2": 34, "LDG.E": 1, "FFMA": 200}
LOOP = LoopFacts(HEADER, 0, 2, 2, 16, 0, 0, OPCODES)
SECOND = replace(LOOP, header=f"{HEADER} #2")
FACTS = CodeFacts("3.6.0", 90, 8, 200, 0, 100000, (LOOP, SECOND), {"EXIT": 1})
VARIANT = Variant("v", None, {}, {}, (), 8, 3, needs_wgmma=True, loops={HEADER: LoopRule(2)})
KNOWN = row(FACTS)


def with_loop(facts=FACTS, **changes):
    return replace(facts, loops=(replace(LOOP, **changes), SECOND))


def test_what_fits_is_accepted():
    assert complaints(VARIANT, FACTS, KNOWN) == []
    assert complaints(VARIANT, replace(FACTS, registers=219), KNOWN) == []
    better = with_loop(in_flight=4, opcodes=OPCODES | {"FFMA": 222, "MUFU.EX2": 33})
    assert complaints(VARIANT, replace(better, shared=90000), KNOWN) == []
    stack = replace(VARIANT, stack={90: 16})
    assert complaints(stack, replace(FACTS, stack=16), KNOWN) == []
    assert CodeFacts.from_json(FACTS.to_json()) == FACTS


@pytest.mark.parametrize(
    ("facts", "messages"),
    [
        (replace(FACTS, stack=24), ["24 bytes of stack, allowed: 0"]),
        (replace(FACTS, registers=221), ["221 registers, 200 before"]),
        (
            replace(FACTS, shared=227 * 1024 + 1),
            ["the limit is 232448", "100000 before", "0 blocks per multiprocessor, 1 before"],
        ),
        (
            with_loop(in_flight=0),
            ["0 groups of copies in flight during a product, expected: 2", "0 groups .* 2 before"],
        ),
        (with_loop(in_flight=None), ["no copies in flight", "None groups"]),
        (with_loop(awaited_loads=1), ["wait for 1 loads", "awaited_loads: 1, 0 before"]),
        (with_loop(tile_loads=2), ["2 tiles are loaded into registers"]),
        (with_loop(copy_bytes=4), ["copies of 4 bytes, expected: 16"]),
        (with_loop(opcodes=OPCODES | {"FFMA": 300}), ["343 issue slots, 243 before"]),
        (with_loop(opcodes=OPCODES | {"LDG.E": 2}), ["loads: 2, 1 before"]),
        (with_loop(opcodes=OPCODES | {"STL": 2}), ["2 loads and stores of spilled registers"]),
        (
            with_loop(opcodes={"HMMA.16816.F32.BF16": 8, "MUFU.EX2": 34}),
            ["0 wgmma and 8 mma instructions"],
        ),
        (
            with_loop(opcodes={"IMMA.16832.S8.S8.SAT": 8, "MUFU.EX2": 34}),
            ["0 wgmma and 8 mma instructions"],
        ),
        (with_loop(header="for x in y"), ["no rule in 'v'", "x in y: not known", "any more"]),
        (replace(FACTS, loops=(LOOP,)), ["#2: no product any more"]),
        (replace(FACTS, loops=()), ["no wgmma", "any more", "any more"]),
    ],
)
def test_what_has_become_worse_is_refused(facts, messages):
    refusals = complaints(VARIANT, facts, KNOWN)
    assert len(refusals) == len(messages), refusals
    for message in messages:
        assert any(re.search(message, bad) for bad in refusals), refusals


def test_a_version_without_baseline_is_refused():
    (complaint,) = complaints(VARIANT, FACTS, None)
    assert "no baseline for Triton 3.6.0" in complaint
