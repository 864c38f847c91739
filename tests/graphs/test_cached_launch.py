"""Promise: known code is launched as Triton chooses, and with the arguments of the call."""

import pytest
import torch

pytest.importorskip("triton", reason="it is for Linux")

from triton.backends.nvidia.driver import CudaLauncher

from gpuscore_kernels.add_rms_norm import triton as norm_module
from gpuscore_kernels.cached_launch import c_function
from graphs.device import device


def rows(columns=1024, dtype=torch.bfloat16):
    return torch.empty(4, columns, dtype=dtype, device="cuda")


# Two inputs of add_rms_norm that differ in nothing else.
PARTS = {
    "alignment": lambda: [(wide := rows(1028))[:, :1024], wide[:, 1:1025]],
    "numbers": lambda: [rows(), rows(1028)[:, :1024]],
    "dtypes": lambda: [rows(), rows(dtype=torch.float16)],
}


@pytest.mark.parametrize("part", PARTS)
def test_code_for_other_arguments_is_not_taken(part):
    with device() as (recorder, _):
        first, other = PARTS[part]()
        for x in (first, first, other):
            norm_module.add_rms_norm(x, None, torch.empty_like(x[0]), 1e-6, one_plus=False)
        assert recorder.problems == []


def launcher(scratch=0):
    """Return Triton's launcher, of the installed version, that notes calls of its function in C."""
    made = object.__new__(CudaLauncher)  # which would need a driver
    made.global_scratch_size, made.profile_scratch_size, made.launch_pdl = scratch, 0, False
    made.global_scratch_align, made.profile_scratch_align = 1, 1
    made.launch_cooperative_grid, made.num_ctas = False, 1
    made.arg_annotations, made.kernel_signature = ("annotation",), b"signature"  # since Triton 3.7
    made.calls = []
    made.launch = lambda *arguments: made.calls.append(arguments)
    return made


def test_the_function_in_c_is_called_as_by_triton():
    launched, arguments = launcher(), (4096, 8192, 7, 1.5, True)
    run, first, nested = c_function(launched, 99, (4, 1, 0))
    assert launched.calls == []
    run(2, 3, 1, 55, *first, *([arguments] if nested else arguments))
    launched(2, 3, 1, 55, 99, (4, 1, 0), None, None, None, *arguments)
    ours, by_triton = launched.calls
    assert ours == by_triton


def test_code_that_needs_memory_is_launched_by_tritons_launcher():
    launched = launcher(scratch=128)
    assert c_function(launched, 99, (4, 1, 0)) == (
        launched,
        (99, (4, 1, 0), None, None, None),
        False,
    )


def test_an_unknown_order_of_arguments_is_an_error(monkeypatch):
    monkeypatch.setattr(
        CudaLauncher, "__call__", lambda self, *arguments: self.launch(*reversed(arguments))
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="calls its function in C with"):
        c_function(launcher(), 99, (4, 1, 0))
