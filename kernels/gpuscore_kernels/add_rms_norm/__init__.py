"""The residual stream plus a layer's output, and the RMS norm of the sum, in one pass."""
