"""Facts about the code that Triton generates: a development tool, which needs no GPU."""
