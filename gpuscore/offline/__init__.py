"""Scoring in this process: `Scorer`, and its results."""
