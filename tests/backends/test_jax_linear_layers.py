"""Promise: a defect planted in JAX's linear layers is seen, and batches that are divided keep their
states."""

from itertools import pairwise

import numpy as np
import pytest

from gpuscore.types.batch import Prefix, Segment, pack
from support.backends import needs_jax
from support.batches import NO_PAGES, int32, item_segments
from support.slow import slow

from .test_linear_layers import (
    VISIBLE,
    a_state_leaks_to_a_sibling,
    changed,
    items_begin_without_a_state,
    the_convolution_does_not_see_the_parent,
    worst_error,
)

pytestmark = needs_jax


def test_a_part_of_a_batch_keeps_its_states():
    """Trees of three requests, each of which keeps some states, in three parts."""
    from gpuscore.backends.jax.launched import segments_of

    rng, segments, kept = np.random.default_rng(0), [], ((2, 7), (), (1, 9, 30))
    roots, slot = [], 0
    for request, ends in enumerate(kept):
        roots.append(len(segments))
        states = [(end, slot + at) for at, end in enumerate(ends)]
        slot += len(ends)
        ids = int32(rng.integers(0, 400, 30))
        segments.append(Segment(ids, 0, request, states=states))
        segments += item_segments([[1, 2], [3]], 30, request, roots[-1], [5])
    batch = pack(segments, [Prefix(0, NO_PAGES)] * 3)
    bounds = [*roots, len(segments)]
    parts = [segments_of(batch, first, stop) for first, stop in pairwise(bounds)]
    for part, ends in zip(parts, kept, strict=True):
        assert (part.state_rows + 1).tolist() == list(ends)
    slots = np.concatenate([part.state_slots for part in parts])
    np.testing.assert_array_equal(slots, batch.state_slots)


def the_decay_is_dropped(monkeypatch):
    from gpuscore.backends.jax import linear_layer

    changed(
        monkeypatch,
        linear_layer,
        "computed",
        lambda run: lambda net, w, *rest: run(net, w._replace(decay=w.decay * 0), *rest),
    )


def ends_share_a_place(monkeypatch):
    """A wave overwrites a state that others have yet to begin with."""
    from gpuscore.backends.jax import waves

    def shared(in_waves):
        return lambda *args: (
            [(chunk, min(place, 0)) for chunk, place in wave] for wave in in_waves(*args)
        )

    changed(monkeypatch, waves, "in_waves", shared)


def a_slot_is_read_after_it_was_written(monkeypatch):
    """Chunks that begin with a kept state begin with zeros, as if it had not been read before."""
    from gpuscore.backends.jax.linear_layer import Recurrence

    changed(
        monkeypatch, Recurrence, "_read", lambda read: lambda recurrence, layer, buffers, _: buffers
    )


def the_convolution_has_the_wrong_requests_tail(monkeypatch):
    from gpuscore.backends.jax import padding

    def rolled(fill):
        def filled(tables, *rest):
            fill(tables, *rest)
            tables.before[:] = np.roll(tables.before, 1)

        return filled

    changed(monkeypatch, padding, "fill_states", rolled)


def the_output_has_no_gate(monkeypatch):
    from gpuscore.backends.jax import decoder

    changed(
        monkeypatch,
        decoder,
        "after_attention",
        lambda after: lambda layer, *rest: after(layer._replace(gate=None), *rest),
    )


@pytest.mark.parametrize(
    "plant",
    [
        the_decay_is_dropped,
        *slow(
            a_state_leaks_to_a_sibling,
            items_begin_without_a_state,
            the_convolution_does_not_see_the_parent,
            ends_share_a_place,
            a_slot_is_read_after_it_was_written,
            the_convolution_has_the_wrong_requests_tail,
            the_output_has_no_gate,
        ),
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_defect_is_visible(tiny_model, monkeypatch, plant):
    plant(monkeypatch)
    assert worst_error(tiny_model, backend="jax") > VISIBLE
