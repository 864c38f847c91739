"""Tensor parallel: processes that share a model, each with its heads and columns of it."""
