"""Norm and activation before a product of eight bits, with rows quantised in the same pass.

The result in the model's dtype is rounded to it, as if it were stored, but only its eight bits are.
"""
