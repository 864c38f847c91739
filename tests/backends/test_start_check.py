"""Promise: at start the chosen kernels are held to the reference, and every defect planted on
purpose is refused with numbers, in half precision, too; models of all families are accepted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.common import start_check as common
from gpuscore.backends.torch import backend, start_check
from gpuscore.backends.torch.attention.tiled import TorchAttention
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.layers import norm_and_rotate
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import page_slots, visible_rows
from gpuscore_kernels.extend_attention.reference import extend_attention
from gpuscore_kernels.extend_attention.table import NUM_PACKED
from gpuscore_kernels.reference import gated, rms_norm
from support.backends import needs_jax
from support.slow import slow

QUICK = [("qwen3", "bfloat16"), ("gemma2", "float32"), ("qwen3_moe", "bfloat16")]
OTHERS = [
    (family, dtype)
    for family in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "gemma", "gemma3")
    for dtype in ("float32", "bfloat16", "float16")
    if (family, dtype) not in QUICK and (family, dtype) != ("gemma3", "float16")
]


def start(tiny_model, family, dtype, **options):
    directory, _ = tiny_model(family)
    options = {"max_batch_tokens": 64} | options
    config = ModelConfig(str(directory), device="cpu", dtype=dtype, **options)
    create_backend(plan_backend(directory, config)).close()


@pytest.mark.parametrize(("family", "dtype"), [*QUICK, *slow(*OTHERS)])
def test_what_is_right_is_accepted(tiny_model, family, dtype):
    start(tiny_model, family, dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True, "max_batch_tokens": 128},
        *slow(
            {"compile": "on"},
            {"max_batch_tokens": 16, "max_model_len": 8},
        ),
    ],
)
def test_what_is_right_is_accepted_with_options(tiny_model, options):
    start(tiny_model, "qwen3", "bfloat16", **options)


def changed_batches(monkeypatch, **change):
    """Have attention read other fields of a batch; each function gets the field."""
    prepare = TorchAttention.prepare

    def wrong(backend, batch):
        return prepare(
            backend, replace(batch, **{n: f(getattr(batch, n)) for n, f in change.items()})
        )

    monkeypatch.setattr(TorchAttention, "prepare", wrong)


def changed_function(monkeypatch, right, wrong):
    """Have the chosen kernels compute another function than the reference."""
    monkeypatch.setattr(backend, "eagerly", lambda f: wrong if f is right else f)


def items_do_not_see_the_query(monkeypatch):
    changed_batches(monkeypatch, parent=lambda parent: np.full_like(parent, -1))


def an_item_sees_its_sibling(monkeypatch):
    def chained(parent):
        return np.where(parent >= 0, np.arange(len(parent)) - 1, parent).astype(parent.dtype)

    changed_batches(monkeypatch, parent=chained)


def a_page_is_stale(monkeypatch):
    """The last of a query's pages is read where an earlier one lies."""

    def stale(table):
        return np.where(table == table[:, :1], table[:, 1:2], table) if table.size else table

    changed_batches(monkeypatch, page_table=stale)


def pages_are_not_written(monkeypatch):
    monkeypatch.setattr(KVPool, "write", lambda *_: None)


def two_heads_are_swapped(monkeypatch):
    def swapped(*arguments):
        q, k, v = norm_and_rotate(*arguments)
        return q.flip(1), k, v

    changed_function(monkeypatch, norm_and_rotate, swapped)


def a_kernel_writes_nothing(monkeypatch):
    def empty(gate_up, activation):
        return torch.zeros_like(gated(gate_up, activation))

    changed_function(monkeypatch, gated, empty)


def a_norm_has_no_weight(monkeypatch):
    def plain(x, weight, eps, one_plus):
        return rms_norm(x, torch.ones_like(weight), eps, one_plus)

    changed_function(monkeypatch, rms_norm, plain)


def a_tile_of_keys_is_left_out(monkeypatch):
    """The last 16 of many keys that are read without a mask."""

    def short(rows, pool, tiles, *how):
        few = tiles.tiles.clone()
        few[:, NUM_PACKED] = (few[:, NUM_PACKED] - 1).clamp(min=0)
        return extend_attention(rows, pool, replace(tiles, tiles=few), *how)

    changed_function(monkeypatch, extend_attention, short)


PLANTS = [
    items_do_not_see_the_query,
    an_item_sees_its_sibling,
    a_page_is_stale,
    pages_are_not_written,
    two_heads_are_swapped,
    a_kernel_writes_nothing,
    a_norm_has_no_weight,
    a_tile_of_keys_is_left_out,
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_defect_is_refused(tiny_model, monkeypatch, plant, dtype):
    plant(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"differ by up to .* nats \(allowed: .*\); choose another"
    ):
        start(tiny_model, "qwen3", dtype)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"attention_scale": 0.3}),
        ("gemma3", {"windows": (None, None, None)}),
    ],
)
def test_attention_of_another_model_is_refused(tiny_model, monkeypatch, family, change):
    make = TorchAttention.__init__
    monkeypatch.setattr(
        TorchAttention,
        "__init__",
        lambda self, config, *rest: make(self, replace(config, **change), *rest),
    )
    with pytest.raises(ConfigError, match="differs from the reference"):
        start(tiny_model, family, "float32")


def blind_to_parents(batch):
    return visible_rows(replace(batch, parent=np.full_like(batch.parent, -1)))


def not_causal(batch):
    seen = visible_rows(batch)
    return seen | seen.T


@pytest.mark.parametrize("rule", [blind_to_parents, not_causal])
def test_kernels_are_held_to_the_rule_itself(tiny_model, monkeypatch, rule):
    monkeypatch.setattr(start_check, "visible_rows", rule)
    with pytest.raises(ConfigError, match=r"scores of known requests \(packed together\)"):
        start(tiny_model, "qwen3", "float32")


def test_the_batches_hold_every_layout():
    """All rows are compared packed; some also in chunks, behind cached pages, and alone."""
    known = common.KnownRequests(400, 400, 16)
    batches = list(known.batches())
    packed, first, second, cached, alone = (batch for _, _, batch in batches)
    assert sorted(known.rows(known.all_pieces)) == list(range(packed.num_tokens))
    assert np.diff(packed.cu_seqlens).tolist()[:2] == [37, 1]
    assert np.diff(packed.cu_seqlens).max() == 150
    assert packed.parent.max() > 0, "a label continues an item"
    slots = np.concatenate((first.slot_mapping, second.slot_mapping))
    np.testing.assert_array_equal(slots, page_slots(known.pages, 0, 150, 16))
    assert (second.prefix_lens[1], cached.prefix_lens[1]) == (common.CHUNK, 150)
    assert len(alone.score_rows) < 16, "few rows have another kernel"
    for _, pieces, batch in batches:
        ids = packed.token_ids[known.rows(pieces)]
        np.testing.assert_array_equal(batch.token_ids[batch.score_rows], ids)


# ---- JAX, where devices other than CPUs are checked ----


@pytest.fixture
def check_jax(tiny_model):
    def run(family="qwen3", dtype="float32"):
        directory, _ = tiny_model(family)
        sizes = {"max_model_len": 256, "max_batch_tokens": 512}
        config = ModelConfig(str(directory), backend="jax", dtype=dtype, **sizes)
        backend = create_backend(plan_backend(directory, config))
        try:
            backend.check_start()
        finally:
            backend.close()

    return run


@needs_jax
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "bfloat16"),
        *slow(("llama", "float32"), ("mistral", "bfloat16"), ("qwen2", "float16")),
    ],
)
def test_jax_is_accepted(check_jax, family, dtype):
    check_jax(family, dtype)


def jax_sees_one_row_more(tables):
    return tables._replace(seen_until=tables.seen_until + 1)


def jax_reads_a_stale_page(tables):
    return tables._replace(pages=tables.pages * 0)


def jax_writes_beside(tables):
    return tables._replace(run_slots=tables.run_slots ^ 1)


@needs_jax
@pytest.mark.parametrize(
    "change", [jax_sees_one_row_more, *slow(jax_reads_a_stale_page, jax_writes_beside)]
)
def test_a_defect_of_jax_is_refused(check_jax, monkeypatch, change):
    from gpuscore.backends.jax import programs

    divided = programs.divided
    monkeypatch.setattr(programs, "divided", lambda *arguments: change(divided(*arguments)))
    with pytest.raises(
        ConfigError, match="--attention xla with --backend jax differs from the reference"
    ):
        check_jax()
