"""Scheduling, packing and the step loop: pure Python and NumPy, no device, no HTTP."""
