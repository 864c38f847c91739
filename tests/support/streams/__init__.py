"""A happens-before checker for the CUDA launcher: `make check-streams`.

The product's own code runs on CPU tensors that play CUDA's (`card`, `tensors`). A recorder
(`recorder`) tells a checker (`checker`) about every access and every wait. The engine's simulation
drives it (`worlds`).
"""
