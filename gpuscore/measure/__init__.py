"""Measurements: parity, evaluation and calibration."""
