"""Token ids of the tiny models, for tests that need no transformers."""

import numpy as np

VOCAB = 400


def random_ids(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB, length).tolist()
