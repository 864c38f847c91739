"""Scorers to compare gpuscore with: three ways to score with transformers.

Each takes (query, items) as token ids and returns label log-probabilities [N, labels], float64.
They run on the device of the model.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

LABELS = [11, 23]
BATCH = 32  # prompts, or items on a reused query
PACKED_TOKENS = 1000  # item tokens of one packed row

# Arguments of models are by position (ids, mask, positions, cache): the cache's name changed with
# transformers 5.24.
Array = NDArray[np.float64]


def _log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), dim=-1)[:, LABELS]


@torch.inference_mode()
def padded_batches(model: PreTrainedModel, query: list[int], items: list[list[int]]) -> Array:
    """Score whole prompts, BATCH at a time, with the logits of the last position only."""
    rows = []
    for start in range(0, len(items), BATCH):
        prompts = [query + item for item in items[start : start + BATCH]]
        ids = torch.tensor(prompts, device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        rows.append(_log_probabilities(logits))
    return torch.cat(rows).double().cpu().numpy()


@torch.inference_mode()
def reused_query(model: PreTrainedModel, query: list[int], items: list[list[int]]) -> Array:
    """Compute the query's keys and values once, then score BATCH items at a time on them."""
    rows = []
    cache = _query_cache(model, query)
    for start in range(0, len(items), BATCH):
        ids = torch.tensor(items[start : start + BATCH], device=model.device)
        again = DynamicCache(
            [
                tuple(x.expand(len(ids), -1, -1, -1) for x in (layer.keys, layer.values))
                for layer in cache.layers
            ]
        )
        out = model(ids, None, None, again, use_cache=True, logits_to_keep=1)
        rows.append(_log_probabilities(out.logits[:, -1]))
    return torch.cat(rows).double().cpu().numpy()


@torch.inference_mode()
def packed_mask(model: PreTrainedModel, query: list[int], items: list[list[int]]) -> Array:
    """Score several items in one row on the query's cache, with a hand-written mask."""
    rows = []
    cache = _query_cache(model, query)
    length = len(items[0])
    count = max(1, PACKED_TOKENS // length)
    for start in range(0, len(items), count):
        some = items[start : start + count]
        causal = torch.ones(length, length, device=model.device).tril()
        mask = torch.block_diag(*[causal] * len(some)).bool()
        visible = torch.cat([mask.new_ones(len(mask), len(query)), mask], dim=1)
        bias = causal.new_zeros(visible.shape, dtype=model.dtype)
        bias.masked_fill_(~visible, -torch.inf)
        positions = len(query) + torch.arange(length, device=model.device)
        out = model(
            torch.tensor([[token for item in some for token in item]], device=model.device),
            bias[None, None],
            positions.repeat(len(some))[None],
            cache,
            use_cache=True,
            logits_to_keep=torch.arange(length - 1, len(mask), length, device=model.device),
        )
        rows.append(_log_probabilities(out.logits[0]))
        cache.crop(-len(mask))
    return torch.cat(rows).double().cpu().numpy()


def _query_cache(model: PreTrainedModel, query: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([query], device=model.device)
    model(ids, None, None, cache, use_cache=True, logits_to_keep=1)
    return cache
