"""Eight bits of a plain checkpoint: texts, scales and passes by them, and the verdict at start."""
