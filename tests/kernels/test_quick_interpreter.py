"""Promise: types and tensors of the quicker interpreter are those that Triton's makes."""

import pytest

from support.quick_interpreter import shorten

core = pytest.importorskip("triton.language.core")
SHAPES = (
    [1],
    [2],
    [16, 32],
    [32, 16],
    [core.constexpr(16), core.constexpr(32)],
    core.tuple([4, 1]),
)
SCALARS = (
    core.int1,
    core.int32,
    core.uint32,
    core.bfloat16,
    core.float32,
    core.pointer_type(core.float16),
    core.pointer_type(core.float16, const=True),
)


def made():
    """Return what types and tensors of all sizes look like."""
    blocks = [core.block_type(scalar, shape) for scalar in SCALARS for shape in SHAPES]
    return [looks(core.tensor("data", type_)) for type_ in (*SCALARS, *blocks)]


def looks(x):
    from triton.runtime.interpreter import _get_np_dtype

    sizes = [(type(size), size.value) for size in x.shape.values]
    shape = repr(vars(x.type) | {"shape": list(getattr(x.type, "shape", ()))})
    return (
        (x.handle, x.dtype, x.numel.value, sizes, str(x.shape.type), shape),
        (x.type.name, _get_np_dtype(x.type), (x.shape == core.tuple([16, 32])).value),
        x.type == core.block_type(core.float32, [16, 32]),
    )


def test_types_are_those_that_triton_makes():
    plain = made()
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        assert made() == plain
        assert made() == plain, "the second time they are not made anew"
        with pytest.raises(ValueError, match="must be a power of 2"):
            core.block_type(core.float32, [3])


def test_shapes_that_hold_other_values_than_sizes():
    def types():
        values = [core.constexpr(True), core.float32, core.tensor(None, core.int32)]
        return [str(core.tuple(values[:count]).type) for count in range(4)]

    plain = types()
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        assert [types(), types()] == [plain, plain]
