"""Promise: `cached_tokens` counts the prompts' tokens that were not computed, also where the nodes
of labels are whole prompts: with --deterministic, or where a family does not fit a batch."""

from support.connections import connected
from support.serving import serving

OPTIONS = [f"option {i}" for i in range(6)]
STATE = "The blue wooden chair stands in the garden beside the red lamp. " * 30
LISTED = "".join(f"{name}: It is thing number {i}.\n" for i, name in enumerate(OPTIONS))
# A single item might become part of the query.
ITEMS = [f"What is it about?\n{LISTED}", f"What is it not about?\n{LISTED}"]
BODY = {"query": STATE, "items": ITEMS, "labels": OPTIONS, "cache_salt": "labels"}


def check_cached_tokens(client):
    usages = [client.post("/v1/score", json=BODY).json()["usage"] for _ in range(2)]
    length = client.post("/tokenize", json={"prompt": STATE}).json()["count"]
    first, again = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert abs(first - length) < 16, "the query, which the items share"
    again -= first
    assert 0.7 * length < again < length + 16, "the query once more, in whole pages or chunks"


def test_a_query_before_labels_of_several_tokens_is_found_in_the_cache(demo):
    check_cached_tokens(demo)


def test_it_is_where_each_label_is_a_prompt_of_its_own(deterministic):
    check_cached_tokens(deterministic)


def test_it_is_where_a_family_does_not_fit_a_batch():
    flags = ("--threads", "1", "--max-batch-tokens", "64")
    with serving("demo", *flags) as running, connected(running) as client:
        check_cached_tokens(client)
