"""Promise: every defect planted on purpose moves scores by far more than any tolerance in the
suite.

This keeps the parity tests honest: a comparison that misses these defects would prove nothing.
"""

import dataclasses

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.backends.torch import backend, decoder, launcher, layers, mixture
from gpuscore.backends.torch.attention import tiled
from gpuscore.engine import jobs
from support.models import random_ids, reference_logprobs

LABELS = [3, 17]
VISIBLE = 1e-2  # a hundred times the tolerance of the parity tests


def without_the_check_at_start(monkeypatch):
    """Leave out the check that would refuse most defects before a score is compared."""
    monkeypatch.setattr(backend, "check_start", lambda *_: None)


def patched(monkeypatch, module, name, change):
    """Replace module.name by change(original)."""
    monkeypatch.setattr(module, name, change(getattr(module, name)))


def worst_error(tiny_model, family="qwen3", max_batch_tokens=64):
    """Return max |delta log p| against transformers for a query in chunks with items packed beside
    it."""
    directory, model = tiny_model(family)
    rng = np.random.default_rng(0)
    query, items = random_ids(rng, 75), [random_ids(rng, n) for n in (3, 9, 1, 20, 33)]
    expected = reference_logprobs(model, [query + item for item in items])[:, LABELS]
    with Scorer(str(directory), max_batch_tokens=max_batch_tokens) as scorer:
        result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    return np.abs(result.logprobs - expected).max()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "qwen3_moe"])
def test_without_a_defect(tiny_model, family):
    assert worst_error(tiny_model, family) < 1e-4


def in_tables(monkeypatch, change):
    """Build tables of changed layouts."""
    patched(monkeypatch, tiled, "layout_of", lambda make: lambda *a: change(make(*a)))


def one_cached_token_is_dropped(monkeypatch):
    in_tables(
        monkeypatch, lambda made: made._replace(prefix_lens=np.maximum(made.prefix_lens - 1, 0))
    )


def items_see_each_other(monkeypatch):
    """Each item continues the one before it."""

    def chained(made):
        parent = np.where(made.parent >= 0, np.arange(len(made.parent)) - 1, made.parent)
        return made._replace(parent=parent.astype(np.int32))

    in_tables(monkeypatch, chained)


def all_positions_are_scaled(monkeypatch):
    """Stretch all positions; a rotary embedding would hide a shift."""
    patched(
        monkeypatch,
        decoder,
        "rotary_tables",
        lambda tables: lambda positions, **f: tables(positions * 2, **f),
    )


def the_wrong_row_is_scored(monkeypatch):
    def earlier(pack):
        def packed(*a, **k):
            batch = pack(*a, **k)
            return dataclasses.replace(batch, score_rows=batch.score_rows - 1)

        return packed

    patched(monkeypatch, jobs, "pack_columns", earlier)


def a_page_is_swapped(monkeypatch):
    def swap(slots):
        return lambda pages, *a: slots(np.roll(pages, 1), *a)

    patched(monkeypatch, jobs, "page_slots", swap)


def the_vocabulary_is_cut_short(monkeypatch):
    """The log-sum-exp misses the last tenth of the vocabulary."""
    patched(
        monkeypatch,
        launcher,
        "vocab_statistics",
        lambda run: lambda h, w, rows, **k: run(h, w[: len(w) * 9 // 10], rows, **k),
    )


DEFECTS = [
    one_cached_token_is_dropped,
    items_see_each_other,
    all_positions_are_scaled,
    the_wrong_row_is_scored,
    a_page_is_swapped,
    the_vocabulary_is_cut_short,
]


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_defect_is_visible(tiny_model, monkeypatch, plant):
    without_the_check_at_start(monkeypatch)
    plant(monkeypatch)
    assert worst_error(tiny_model) > VISIBLE


def a_window_is_one_longer(monkeypatch):
    patched(
        monkeypatch,
        tiled.TableBuilder,
        "tables",
        lambda make: lambda self, rows, window: make(self, rows, window and window + 1),
    )


def scores_are_not_capped(monkeypatch):
    patched(
        monkeypatch,
        backend,
        "extend_attention",
        lambda run: lambda *a: run(*a[:-1], None),
    )


def windows_share_the_rope(monkeypatch):
    patched(
        monkeypatch,
        decoder.DecoderConfig,
        "rope_of",
        lambda _: lambda config, layer: config.rope,
    )


def the_second_expert_is_dropped(monkeypatch):
    def first_only(choose):
        def routed(*a):
            weights, chosen = choose(*a)
            return weights * layers.torch.tensor([1.0, 0.0]), chosen

        return routed

    patched(monkeypatch, mixture, "choose", first_only)


@pytest.mark.parametrize(
    ("plant", "family"),
    [
        (a_window_is_one_longer, "gemma2"),
        (scores_are_not_capped, "gemma2"),
        (windows_share_the_rope, "gemma3"),
        (the_second_expert_is_dropped, "qwen3_moe"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_defect_of_one_family_is_visible(tiny_model, monkeypatch, plant, family):
    without_the_check_at_start(monkeypatch)
    plant(monkeypatch)
    assert worst_error(tiny_model, family) > VISIBLE
