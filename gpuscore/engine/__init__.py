"""Scheduling, packing and the step loop, in pure Python and NumPy: no device code, no HTTP."""
