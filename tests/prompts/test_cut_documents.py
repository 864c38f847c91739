"""Promise: `truncate` cuts only the documents that are too long, to the longest that fits."""

import pytest

from gpuscore.config import RequestLimits
from gpuscore.prompts import registry
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.families import ids_of, qwen_like


def prompts_of(family, max_len):
    limits = BackendLimits(512, 16, 400, max_len, 2000)
    return FamilyPrompts(family, PromptBuilder(TextEncoder(qwen_like()), limits, RequestLimits()))


@pytest.mark.parametrize("query", ["q", "what is the best? ", "x\n"])
def test_only_what_is_too_long_is_cut_and_fills_the_limit(query):
    """Tries every length around the limit, and texts that merge with the prompt's."""
    family, texts = (
        registry.ZERANK,
        ["the" * 60, "yes no " * 40, "\u00e9\u4f60" * 40, "12 the\n" * 30],
    )
    whole = prompts_of(family, 700)
    for text in texts:
        documents = [text[:end] for end in range(len(text) + 1)]
        lengths = [len(ids) for ids in ids_of(whole.build(RerankInput(query, documents)))]
        limit = lengths[len(documents) // 2]
        built = prompts_of(family, limit).build(RerankInput(query, documents, fit=True))
        long = tuple(i for i, length in enumerate(lengths) if length > limit)
        assert built.truncated == long
        cut = ids_of(built)
        assert [len(cut[i]) for i in range(len(cut)) if i not in long] == [
            length for length in lengths if length <= limit
        ]
        assert {len(cut[i]) for i in long} <= {limit - 2, limit - 1, limit}
