"""Attention backends of torch, and the choice among them."""
