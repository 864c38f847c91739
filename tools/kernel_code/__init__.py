"""Gate on the code that Triton generates for the kernels; a development tool, needs no GPU."""
