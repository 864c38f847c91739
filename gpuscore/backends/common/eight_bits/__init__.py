"""Eight bits of a plain checkpoint: rotation, texts, what they decide, and the verdict at start."""
