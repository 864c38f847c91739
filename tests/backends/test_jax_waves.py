"""Promise: whatever the tree, JAX's waves of chunks hold few end states, and overwrite none that a
chunk has yet to begin with."""

from collections import Counter

import numpy as np
import pytest

from gpuscore.backends.common.state_chunks import StateChunks
from support.backends import needs_jax

pytestmark = needs_jax


def random_parents(rng, count):
    """Return a tree: of any shape, nearly a chain, or of chains side by side."""
    shape, parents = rng.integers(3), [-1]
    for chunk in range(1, count):
        first = (-1, chunk - 1 if rng.random() < 0.8 else -1, max(-1, chunk - 3))[shape]
        parents.append(int(rng.integers(first, chunk)))
    return parents


def run_waves(parents, kept, most, room):
    """Run the waves as a program does, and check each; return their number."""
    from gpuscore.backends.jax.waves import in_waves

    zeros = np.zeros(len(parents), np.int64)
    chunks = StateChunks(zeros, zeros, parents, [-1] * len(parents), dict.fromkeys(kept, [0]))
    children, place, held, waves = Counter(parents), {}, {}, 0
    for wave in in_waves(chunks, most, room):
        waves += 1
        assert 0 < len(wave) <= most
        ends = [at >= 0 for _, at in wave]
        assert ends == sorted(ends, reverse=True), "ends that are held come first"
        for chunk, _ in wave:
            if (parent := parents[chunk]) >= 0:
                assert held[place[parent]] == parent, "its parent's end was overwritten"
        for chunk, at in wave:
            assert chunk not in place, "computed twice"
            assert (at >= 0) == (children[chunk] > 0 or chunk in kept)
            assert at < room
            place[chunk] = at
        new = {at: chunk for chunk, at in wave if at >= 0}
        assert len(new) == sum(ends), "two ends of a wave have one place"
        held |= new
    assert len(place) == len(parents)
    return waves


@pytest.mark.parametrize("seed", range(30))
def test_random_trees_in_the_least_room(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        count = int(rng.integers(1, 120))
        kept = {int(chunk) for chunk in rng.integers(0, count, 3)}
        parents = random_parents(rng, count)
        run_waves(parents, kept, int(rng.integers(1, 9)), count.bit_length())


def test_deep_trees_of_which_every_chunk_has_a_sibling():
    """Held in the order of the batch, these would be half of all ends at a time."""
    parents = [-1, *(chunk - 1 if chunk % 2 else chunk - 2 for chunk in range(1, 4000))]
    run_waves(parents, set(), 8, 3)


def test_items_of_a_query_run_together():
    query = [*range(-1, 7)]
    assert run_waves(query + [7] * 96, set(), 8, 32) == 8 + 12


def test_queries_run_together():
    """50 queries of two chunks, each with six items of one: hardly a wave has room left."""
    parents = []
    for _ in range(50):
        first = len(parents)
        parents += [-1, first, *[first + 1] * 6]
    assert run_waves(parents, set(), 8, 32) <= 1.1 * len(parents) / 8
