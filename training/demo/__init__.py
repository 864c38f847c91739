"""The embedded demonstration model: its synthetic world, its training and its files."""
