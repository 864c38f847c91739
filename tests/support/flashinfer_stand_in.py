"""FlashInfer's wrapper in plain torch, as its documentation describes them, for machines without a
GPU. Arguments of plans are bound to the signatures of the locked release (`stubs/flashinfer`)."""

import inspect
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import torch

STUB = Path(__file__).resolve().parents[2] / "stubs" / "flashinfer" / "__init__.pyi"


def stub():
    """Return the stub as a module; its methods have the release's parameters and no bodies."""
    loader = SourceFileLoader("flashinfer_stub", str(STUB))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def bound(method, *args, **keywords):
    """Bind arguments; raise TypeError if the release does not have such parameters."""
    arguments = inspect.signature(method).bind(None, *args, **keywords)
    arguments.apply_defaults()
    return arguments.arguments


class Sequence:
    """Rows and keys of one of FlashInfer's requests."""

    def __init__(self, index, rows, starts, pages, last):
        self.rows = slice(int(rows[index]), int(rows[index + 1]))
        used = pages[int(starts[index]) : int(starts[index + 1])].long()
        assert int(last[index]) == (len(used) > 0)  # pages of one token
        self.keys = used

    def visible(self, causal):
        """[rows, keys]; with a causal mask the last row sees all keys."""
        rows, keys = self.rows.stop - self.rows.start, len(self.keys)
        last = torch.arange(rows)[:, None] + keys - rows
        return torch.arange(keys) <= last if causal else torch.ones(rows, keys, dtype=torch.bool)


def sequences(rows, starts, pages, last):
    assert int(rows[0]) == int(starts[0]) == 0
    assert int(starts[-1]) == len(pages)
    return [Sequence(i, rows, starts, pages, last) for i in range(len(rows) - 1)]


def attention(q, pages, visible, scale):
    """Attention of q [T, H, D] over pages [keys, 2, 1, Hkv, D]; visible is [T, keys]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in pages[:, :, 0].unbind(1))
    scores = torch.einsum("thd,khd->htk", q, k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0)
    return torch.einsum("htk,khd->thd", weights, v)


class Items:
    """Stands in for BatchPrefillWithPagedKVCacheWrapper in its multi-item mode."""

    def __init__(self, *args, **keywords):
        self.real = stub().BatchPrefillWithPagedKVCacheWrapper
        assert bound(self.real.__init__, *args, **keywords)["kv_layout"] == "NHD"

    def plan(self, *args, **keywords):
        self.asked = asked = bound(self.real.plan, *args, **keywords)
        assert (asked["page_size"], asked["q_data_type"]) == (1, "float32")
        assert asked["prefix_len_ptr"].dtype == torch.uint32
        assert asked["token_pos_in_items_ptr"].dtype == torch.uint16
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        self.sequences = sequences(*(asked[name] for name in names))

    def run(self, q, paged_kv_cache):
        pages = paged_kv_cache
        seen = torch.zeros(len(q), len(pages), dtype=torch.bool)
        for index, sequence in enumerate(self.sequences):
            mask = sequence.visible(self.asked["causal"])
            for row in range(len(mask)):
                mask[row] &= self._item(index, len(sequence.keys) - len(mask) + row, mask.shape[1])
            seen[sequence.rows, sequence.keys] = mask
        return attention(q, pages, seen, self.asked["sm_scale"])

    def _item(self, index, place, count):
        """Keys of the prefix, and of the item of the token at `place`."""
        prefix = int(self.asked["prefix_len_ptr"][index])
        keys = torch.arange(count)
        if place < prefix:
            return keys >= 0
        at = index * self.asked["token_pos_in_items_len"] + place - prefix
        position = int(self.asked["token_pos_in_items_ptr"][at])
        assert position <= int(self.asked["max_item_len_ptr"][index])
        return (keys < prefix) | (keys > place - position)
