"""Labels of several tokens: their nodes as items of a request, and its rows added up again.

A request with a `LabelTrie` is computed as one in which every item is followed by the trie's nodes,
one token each, which continue it. So a family is an item with its nodes. A node of a family that
does not fit a batch is a whole prompt instead: the item's tokens again, and those down to the node.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpuscore.types.arrays import Float64Array, Int32Array
from gpuscore.types.label_trie import LabelTrie
from gpuscore.types.limits import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult


def with_nodes(request: ScoreRequest, limits: BackendLimits) -> ScoreRequest:
    """Return the request in which nodes are items; itself if all labels are single tokens.

    Each item is followed by its nodes, in the order of the trie's rows.
    """
    trie = request.trie
    if trie is None:
        return request
    request = _in_query(request, limits)
    return with_families(replace(request, trie=None), [trie] * len(request.item_ids), limits)


def with_families(
    request: ScoreRequest, tries: Sequence[LabelTrie], limits: BackendLimits
) -> ScoreRequest:
    """Return the request in which each item is followed by the nodes of its own trie."""
    nodes = {id(trie): list(trie.tokens[:, None]) for trie in tries}
    items: list[Int32Array] = []
    next_ids: list[Int32Array] = []
    parents: list[int] = []
    places: list[int] = []  # of nodes
    for item, trie in zip(request.item_ids, tries, strict=True):
        first = len(items)
        places += range(first + 1, first + trie.num_rows)
        items.append(item)
        next_ids += trie.next_ids
        if _fits(item, trie, limits):
            items += nodes[id(trie)]
            parents += [-1, *(trie.parents + first + 1).tolist()]
        else:
            paths = (np.array(path, np.int32) for path in trie.paths())
            items += [np.concatenate((item, path)) for path in paths]
            parents += [-1] * trie.num_rows
    return replace(
        request,
        item_ids=tuple(items),
        label_ids=tuple(next_ids),
        parents=np.array(parents, np.int32) if max(parents) >= 0 else None,
        nodes=np.array(places, np.int32) if places else None,
    )


def most_tokens(request: ScoreRequest, limits: BackendLimits) -> int:
    """Return the tokens to compute if nothing is cached, whole prompts of nodes included."""
    trie = request.trie
    if trie is None:
        return request.num_tokens
    request = _in_query(request, limits)
    whole = [item for item in request.item_ids if not _fits(item, trie, limits)]
    again = sum(map(len, whole)) * trie.num_nodes
    if whole:
        again += len(whole) * sum(len(path) - 1 for path in trie.paths())
    return request.num_tokens + again


def added_up(result: ScoreResult, trie: LabelTrie) -> ScoreResult:
    """Return the result of a request with nodes as one row per item, and a number per label.

    A label's logit is the sum of its tokens' log-probabilities, plus the log-sum-exp of the item's
    row. So that of a label of one token is the model's own, whatever the other labels are.
    """
    assert result.lse is not None  # noqa: S101  (requests with a trie need it)
    count = len(result.label_logits) // trie.num_rows
    lse = result.lse[:: trie.num_rows]
    sums = trie.sums(_logprobs(result, trie, count)) + lse[:, None].astype(np.float64)
    return replace(result, label_logits=tuple(sums.astype(np.float32)), lse=lse)


def per_token(result: ScoreResult, trie: LabelTrie | None) -> ScoreResult:
    """Return the result with each label's sum divided by the label's number of tokens."""
    if trie is None:
        return result
    assert result.lse is not None  # noqa: S101  (requests with a trie need it)
    lse = result.lse[:, None].astype(np.float64)
    means = (np.stack(result.label_logits) - lse) / trie.lengths + lse
    return replace(result, label_logits=tuple(means.astype(np.float32)))


def _logprobs(result: ScoreResult, trie: LabelTrie, count: int) -> Float64Array:
    """Return the log-probabilities of all rows' tokens, [N, C]."""
    assert result.lse is not None  # noqa: S101  (requests with a trie need it)
    logits = np.concatenate(result.label_logits).astype(np.float64).reshape(count, -1)
    lse = result.lse.astype(np.float64).reshape(count, trie.num_rows)
    own = np.repeat(lse, [*map(len, trie.next_ids)], axis=1)
    # Rounding can put a logit a hair above the log-sum-exp; no probability exceeds 1.
    return np.minimum(logits - own, 0.0)


def _fits(item: Int32Array, trie: LabelTrie, limits: BackendLimits) -> bool:
    """Return True if an item and its nodes may be one family.

    With --deterministic bits depend on what is a segment, so there are no families.
    """
    return not limits.deterministic_chunk and len(item) + trie.num_nodes <= limits.max_tokens


def _in_query(request: ScoreRequest, limits: BackendLimits) -> ScoreRequest:
    """Return a request whose only item keeps its last token, where its family would not fit.

    What all prompts share may be anything, and a query runs in chunks of any size. This needs
    pages. With --deterministic the cut depends on the query alone.
    """
    (item, *others), trie = request.item_ids, request.trie
    if others or trie is None or limits.deterministic_chunk or _fits(item, trie, limits):
        return request
    query = np.concatenate((request.query_ids, item[:-1]))
    if len(query) > limits.num_pages * limits.page_size:
        return request
    return replace(request, query_ids=query, item_ids=(item[-1:],))
