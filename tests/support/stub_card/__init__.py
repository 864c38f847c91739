"""A CUDA card that is not there, for whole programs: `make gpu-day` runs on it from end to end.

Processes started by `python.interpreter` find one CUDA device. CPU tensors play its memory, as in
`support.streams`, whose classes are used here without the checker: operators compute on the CPU,
Triton launches and torch's CUDA-only kernels run references, streams do all work at once, events
take the host's time. So results are right and times are those of this CPU.
"""
