"""Attention and label-head kernels; knows torch, and nothing of gpuscore."""
