"""What kinds of servers are known to do otherwise, so that a check need not be loosened for them.

From the project's reading of their code and threads (September 2026); "not run" marks what follows
from reading alone. A deviation that is not seen is reported too: the table may be out of date.
"""

from collections.abc import Mapping

_PYDANTIC = "true is read as 1, as pydantic does unless told otherwise (not run)"
_NO_LABELS = "RuntimeError 'output_logprobs is empty', a 500"
_MIXED = "only the query's type is looked at; the items' lists become part of the text"
_VOCAB = "ids are compared with tokenizer.vocab_size, which leaves out added tokens"

_SGLANG = {
    "C13.empty-labels": _NO_LABELS,
    "C14.label-boolean": _PYDANTIC,
    "C14.mixed-types": _MIXED,
    "C15.first-and-last": _VOCAB,
    "C15.negative-label": "not looked at before SGLang #28088; reads another token",
    "C15.negative-token": "not looked at (not run)",
    "C17.repeat": "its own tests ask for 5 to 6 decimal places only (not run)",
}
_SGLANG_MIS = _SGLANG | {
    "C1.usage": "prompt_tokens counts the delimiters, SGLang #18381",
    "C6.text": "query and items are tokenised apart, with a BOS each",
    "C7.item_first": "item_first is ignored",
    "C8.text": "query and items are tokenised apart, with a BOS each",
    "C9.text": "one item is tokenised with its query, several apart (not run)",
    "C13.empty-item": "the row of the delimiter before it is read (not run)",
    "C16.large": "one sequence of all items; the context may be too short for it",
}
_SGL_JAX = {
    "C1.usage": "usage is null",
    "C13.empty-labels": "becomes null on the way, then an IndexError, a 500",
    "C13.no-items": "400 for token ids",
    "C14.label-boolean": _PYDANTIC,
    "C15.first-and-last": _VOCAB,
    "C15.negative-label": "not looked at; reads another token",
    "C15.negative-token": "not looked at (not run)",
    "C17.repeat": "its own tests ask for 2 decimal places only (not run)",
}

KNOWN: Mapping[str, Mapping[str, str]] = {
    "strict": {},
    "gpuscore": {},
    "sglang": _SGLANG,
    "sglang-mis": _SGLANG_MIS,
    "sgl-jax": _SGL_JAX,
}
