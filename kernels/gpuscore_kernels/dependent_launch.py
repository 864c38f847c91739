"""Programmatic dependent launch (PDL) in Triton kernels; `launch.has_pdl` names its devices.

A kernel that is launched so may begin as soon as every block of the kernel before it has given the
signal, or has ended. What that kernel writes is visible after the wait, and not before. Each of our
kernels waits first and signals late:

- Nothing touches global memory before the wait. The wait lasts until the kernel before has ended,
  and that one has waited for its own predecessor. So whatever was launched earlier has ended, and
  neither a read nor a write is early.
- The signal comes after the wait. So at most two kernels wait or run at a time.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_kernel_before(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_begin(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
