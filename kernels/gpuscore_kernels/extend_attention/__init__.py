"""Attention of a packed batch over cached pages, parents and own segments."""
