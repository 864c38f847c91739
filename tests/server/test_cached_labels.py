"""Promise: `cached_tokens` counts the prompts' tokens that were not computed, also where the nodes
of labels are whole prompts: with --deterministic, or where a family does not fit a batch."""

import pytest

from support.connections import connected
from support.serving import serving

STATE = "The blue wooden chair stands in the garden beside the red lamp. " * 30


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (30, ()),
        (6, ("--deterministic",)),  # whose prompts, one for each label, take long
        (30, ("--max-batch-tokens", "128")),
        (30, ("--max-batch-tokens", "32")),
    ],
)
def test_a_query_before_labels_of_several_tokens_is_found_in_the_cache(options, flags):
    listed = "".join(f"option {i}: It is thing number {i}.\n" for i in range(options))
    # A single item might become part of the query.
    items = [f"What is it about?\n{listed}", f"What is it not about?\n{listed}"]
    body = {"query": STATE, "items": items, "labels": [f"option {i}" for i in range(options)]}
    with serving("demo", "--threads", "1", *flags) as running, connected(running) as client:
        usages = [client.post("/v1/score", json=body).json()["usage"] for _ in range(2)]
        length = client.post("/tokenize", json={"prompt": STATE}).json()["count"]
    first, again = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert abs(first - length) < 16, "the query, which the items share"
    again -= first
    assert 0.7 * length < again < length + 16, "the query once more, in whole pages or chunks"
