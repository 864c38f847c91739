"""Eight bits of a plain checkpoint: rotation, texts, a recipe made with them, and the verdict."""
