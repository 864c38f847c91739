"""Measurements: bench, parity and evaluation."""
