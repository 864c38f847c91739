"""Eight bits of a plain checkpoint: texts, what they decide, and the verdict at start."""
