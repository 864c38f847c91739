"""Kernels of the decoder, attention and the label head; imports torch and nothing of gpuscore."""

from typing import Literal, TypeAlias

# "reference" computes in plain torch on any device, "triton" on CUDA or in Triton's interpreter.
Implementation: TypeAlias = Literal["reference", "triton"]
