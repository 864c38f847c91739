"""Scoring in this process: calls of `Scorer` and `AsyncScorer`, and their results."""
