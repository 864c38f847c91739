"""Functions on rows of tensors, written in C for CPUs, with the compiler that builds them."""
