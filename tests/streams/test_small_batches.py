"""Promise: a batch that has a graph is launched by its caller if no other is in flight, and by the
backend's thread otherwise."""

import numpy as np
import pytest

from gpuscore.backends.torch import graph_launcher
from gpuscore.backends.torch.graph_launcher import GRAPH_WORDS
from support.batches import in_one_batch
from support.slow import slow
from support.streams.turns import BACKEND, ENGINE
from support.streams.worlds import Life

GRAPH, LAUNCHES = 9, 50  # tokens; graphs hold up to 40 (`SETUPS`)


def batch_of(tokens):
    ids = np.random.default_rng(tokens).integers(1, 1000, tokens).tolist()
    return in_one_batch([], [ids], [3, 17])


@pytest.mark.parametrize(
    ("in_flight", "tokens", "graph_words", "launched_by"),
    [
        (0, GRAPH, GRAPH_WORDS, ENGINE),
        (1, GRAPH, GRAPH_WORDS, BACKEND),
        (0, GRAPH, 8, BACKEND),  # its words have no room in a graph's
        *slow((0, LAUNCHES, GRAPH_WORDS, BACKEND), (1, LAUNCHES, GRAPH_WORDS, BACKEND)),
    ],
)
def test_the_thread_that_launches(model, monkeypatch, in_flight, tokens, graph_words, launched_by):
    life, threads = Life(model, 0), []
    with life.started() as real:
        monkeypatch.setattr(graph_launcher, "GRAPH_WORDS", graph_words)
        launch = real.launcher.launch

        def noted(batch):
            threads.append(life.recorder.thread)
            return launch(batch)

        monkeypatch.setattr(real.launcher, "launch", noted)
        for _ in range(2):  # collected batches are not in flight
            before = [real.extend(batch_of(LAUNCHES)) for _ in range(in_flight)]
            for launched in before:
                launched.result()  # launched by now, and still in flight
            last = real.extend(batch_of(tokens))
            for launched in (*before, last):
                real.collect(launched)
    assert threads[in_flight :: in_flight + 1] == [launched_by] * 2
    assert life.kinds() == set()
