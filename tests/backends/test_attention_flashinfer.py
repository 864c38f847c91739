"""Promise: the plans for FlashInfer, executed as its documentation describes, give every row the
keys of the mask rule."""

import importlib.util

import numpy as np
import pytest

from gpuscore.backends.torch.attention.flashinfer import lay_out_cascade, lay_out_items
from gpuscore.batch import visible_rows
from support.attention_inputs import requests
from support.batches import random_batch

PAGE, SLOTS = 8, 1024


def batches():
    for seed in range(6):
        yield random_batch(np.random.default_rng(seed), SLOTS, PAGE)
    yield requests((0, 0, [1]), page_size=PAGE, num_pages=64)
    yield requests((9, 5, [3, 1]), (0, 7, [2]), (16, 0, [4]), page_size=PAGE, num_pages=64)
    yield requests((9, 5, []), page_size=PAGE, num_pages=64)


def wanted(batch):
    """Yield the keys of each row: slots, then rows of the batch, numbered from SLOTS on."""
    seen = visible_rows(batch)
    requests = np.repeat(batch.request_of, np.diff(batch.cu_seqlens))
    for row, request in enumerate(requests):
        position = np.arange(batch.prefix_lens[request])
        slots = batch.page_table[request, position // PAGE] * PAGE + position % PAGE
        yield sorted([*slots.tolist(), *(SLOTS + np.flatnonzero(seen[row])).tolist()])


def key_numbers(plan, sequences, index):
    """Return the numbers of the keys that the buffer holds at a sequence's pages."""
    numbers = sequences.keys[sequences.starts[index] : sequences.starts[index + 1]]
    buffer = np.concatenate((plan.slots, SLOTS + np.arange(len(plan.rows))))
    return buffer[numbers]


def rows_of(plan, sequences, index):
    return plan.rows[sequences.queries[index] : sequences.queries[index + 1]]


@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: str(batch.num_tokens))
def test_items(batch):
    """A sequence's rows are the last of its keys; row p sees k <= p and, behind the prefix, only
    its own item."""
    plan = lay_out_items(batch, PAGE)
    assert sorted(plan.rows) == list(range(batch.num_tokens))
    found = {}
    for index, prefix in enumerate(plan.prefix_lens):
        keys, rows = key_numbers(plan, plan.sequences, index), rows_of(plan, plan.sequences, index)
        assert plan.longest[index] == plan.positions[index].max()
        for i, row in enumerate(rows):
            p = len(keys) - len(rows) + i
            k = np.arange(p + 1)
            if p >= prefix:
                k = k[(k < prefix) | (k > p - plan.positions[index, p - prefix])]
            found[row] = sorted(keys[k].tolist())
    assert [found[row] for row in range(batch.num_tokens)] == list(wanted(batch))


@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: str(batch.num_tokens))
def test_cascade(batch):
    """Level 0 has no mask, level 1 is causal."""
    plan = lay_out_cascade(batch, PAGE)
    found = {row: [] for row in range(batch.num_tokens)}
    for index in range(len(plan.shared.queries) - 1):
        for row in rows_of(plan, plan.shared, index):
            found[row] += key_numbers(plan, plan.shared, index).tolist()
    for index in range(len(plan.own.queries) - 1):
        for i, row in enumerate(rows_of(plan, plan.own, index)):
            found[row] += key_numbers(plan, plan.own, index)[: i + 1].tolist()
    assert [sorted(keys) for keys in found.values()] == list(wanted(batch))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")
def test_the_arguments_exist():
    import inspect

    import flashinfer

    items = inspect.signature(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan).parameters
    wanted = {"prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len"}
    assert {*wanted, "max_item_len_ptr", "sm_scale", "q_data_type"} <= set(items)
    cascade = inspect.signature(flashinfer.MultiLevelCascadeAttentionWrapper.plan).parameters
    assert {"sm_scale", "q_data_type", "causal"} <= set(cascade)
