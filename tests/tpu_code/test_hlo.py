"""Promise: optimised HLO is read as it stands: layouts with their padding, aliases, loops, cycles
and memory."""

import pytest

from tpu_code.hlo import Program

TEXT = """\
HloModule jit_run, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, \
entry_computation_layout={(bf16[512,256]{1,0})->bf16[512]{0}}

FileNames
1 "a.py"

FunctionNames
1 "layer"
2 "forward"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=40 end_line=40 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%fused_update (p.0: bf16[4,64,128], p.1: bf16[1,64,128], p.2: s32[]) -> bf16[4,64,128] {
  %p.0 = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %p.2 = s32[]{:T(128)} parameter(2)
  ROOT %update = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p.0, %p.1, %p.2)
}

%fused_product (q.0: bf16[512,256], q.1: bf16[3,128,256], q.2: s32[]) -> f32[512,128] {
  %q.0 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %q.1 = bf16[3,128,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  %q.2 = s32[]{:T(128)} parameter(2)
  %part = bf16[1,128,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%q.1, %q.2), \
dynamic_slice_sizes={1,128,256}
  %flat = bf16[128,256]{1,0:T(8,128)(2,1)} bitcast(%part)
  ROOT %product = f32[512,128]{1,0:T(8,128)S(1)} convolution(%q.0, %flat), dim_labels=bf_oi->bf
}

%body (state: (s32[], bf16[4,64,128])) -> (s32[], bf16[4,64,128]) {
  %state = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state), index=0
  %pool = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %page = bf16[1,64,128]{2,1,0:T(8,128)(2,1)S(1)} constant({...})
  %new = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} fusion(%pool, %page, %at), kind=kLoop, \
calls=%fused_update, backend_config={"window_config":{"estimated_cycles":"70"}}
  ROOT %out = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) tuple(%at, %new)
}

%condition (state.1: (s32[], bf16[4,64,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %at.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %bound = s32[]{:T(128)} constant(28)
  ROOT %less = pred[]{:T(512)} compare(%at.1, %bound), direction=LT
}

ENTRY %main (x: bf16[512,256], pool.0: bf16[4,64,128], w: bf16[3,128,256], n: s32[]) -> bf16[1] {
  %x = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
  %pool.0 = bf16[4,64,64]{2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="pool.pages"}
  %w = bf16[3,128,256]{2,1,0:T(8,128)(2,1)} parameter(2), metadata={op_name="weights.w"}
  %n = s32[]{:T(128)} parameter(3), metadata={op_name="n"}
  %y = f32[512,128]{1,0:T(8,128)S(1)} fusion(%x, %w, %n), kind=kOutput, calls=%fused_product, \
backend_config={"window_config":{"estimated_cycles":"900"},"used_scoped_memory_configs":\
[{"memory_space":"1","offset":"0","size":"4096"}]}
  %start = (s32[]{:T(128)}, /*index=1*/bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) tuple(%n, %pool.0)
  %loop = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) while(%start), \
condition=%condition, body=%body, metadata={op_name="jit(run)/while" stack_frame_id=2}
  %loop.2 = (s32[]{:T(128)}, bf16[4,64,128]{2,1,0:T(8,128)(2,1)}) while(%loop), \
condition=%condition, body=%body, metadata={op_name="jit(run)/while" stack_frame_id=2}
  ROOT %copy = f32[512,128]{1,0:T(8,128)} copy(%y)
}
"""


@pytest.fixture(scope="module")
def program():
    return Program(TEXT)


def test_arguments_are_read_with_their_padding(program):
    x, pool, _, n = program.of(program.entry).parameters
    assert (x.shape.bytes, x.shape.padded) == (512 * 256 * 2, 512 * 256 * 2)
    assert (pool.shape.bytes, pool.shape.padded) == (4 * 64 * 64 * 2, 4 * 64 * 128 * 2)
    assert n.shape.padded == 512  # a number takes a whole tile
    assert pool.attribute("op_name") == "pool.pages"
    assert program.aliased() == {0: 1}


def test_memory_and_cycles_of_an_instruction(program):
    y = program.of(program.entry).instructions["y"]
    assert (y.cycles, y.vector_memory) == (900, 4096)
    assert sum(instruction.cycles for instruction in program.within(program.entry)) == 900 + 2 * 70


def test_instructions_of_loops_are_found_and_those_of_fusions_apart(program):
    names = [instruction.name for instruction in program.within(program.entry)]
    assert names.count("new") == 2
    assert "update" not in names
    fusion = program.of("body").instructions["new"]
    *_, last = program.inside(fusion)
    assert last.opcode == "dynamic-update-slice"
