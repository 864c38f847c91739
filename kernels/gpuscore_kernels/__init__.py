"""Kernels of the decoder, attention and the label head; imports torch and nothing of gpuscore."""
