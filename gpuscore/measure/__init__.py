"""Measurements: bench and parity."""
