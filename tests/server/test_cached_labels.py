"""Promise: `cached_tokens` counts the prompts' tokens that were not computed, also where the nodes
of labels are whole prompts: with --deterministic, or where a family does not fit a batch."""

import pytest

from support.connections import connected
from support.serving import serving

STATE = "The blue wooden chair stands in the garden beside the red lamp. " * 30
CHOICE = {
    "type": "choice",
    "instructions": "What is it about?",
    "criteria": {f"option {i}": f"It is thing number {i}." for i in range(30)},
}


@pytest.mark.parametrize(
    "flags",
    [(), ("--deterministic",), ("--max-batch-tokens", "128"), ("--max-batch-tokens", "32")],
    ids=" ".join,
)
def test_a_choice_of_many_options_is_found_in_the_cache(flags):
    body = {"state": STATE, "questions": {"about": CHOICE}}
    with serving("demo", "--threads", "1", *flags) as running, connected(running) as client:
        answers = [client.post("/v1/systemone", json=body).json() for _ in range(2)]
        usages = [answer["usage"] for answer in answers]
    first, again = (usage["input_tokens_details"]["cached_tokens"] for usage in usages)
    total = usages[0]["input_tokens"]
    assert first < 16
    assert total * 0.35 < again < total / 2, "the state, in whole pages or chunks"
