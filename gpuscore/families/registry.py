"""The families that are known by name.

A prompt that differs from the one a model was trained on by a single token gives scores that look
right and are not, so each entry is the model card's own prompt and formula, and the tests hold the
token ids of each.
"""

import re
from collections.abc import Iterable

from gpuscore.families.family import Family

_QWEN_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\n"
)

QWEN3_RERANKER = Family(
    name="qwen3-reranker",
    source="https://huggingface.co/Qwen/Qwen3-Reranker-0.6B",
    parts=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n",
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    positive="yes",
    negative="no",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
MXBAI_RERANK_V2 = Family(
    name="mxbai-rerank-v2",
    source="https://github.com/mixedbread-ai/mxbai-rerank",
    parts=(
        _QWEN_SYSTEM,
        "query: {query}\ndocument: {document}\nYou are a search relevance expert who evaluates how "
        "well documents match search queries. For each query-document pair, carefully analyze the "
        "semantic relationship between them, then provide your binary relevance judgment (0 for "
        "not relevant, 1 for relevant).\nRelevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    positive="1",
    negative="0",
)
ZERANK = Family(
    name="zerank",
    source="https://huggingface.co/zeroentropy/zerank-1",
    parts=(
        "<|im_start|>",
        "system\n{query}",
        "<|im_end|>\n<|im_start|>",
        "user\n{document}",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    positive="Yes",
    negative=None,
    scale=5.0,
    strip=True,
)
DEMO = Family(
    name="demo",
    source="gpuscore.models.synthetic",
    parts=("query: {query}\nitem: {document}",),
    positive="yes",
    negative="no",
)

FAMILIES = {family.name: family for family in (QWEN3_RERANKER, MXBAI_RERANK_V2, ZERANK, DEMO)}

# By the model's name without its owner; conversions keep the name and add to it.
_BY_NAME = (
    (re.compile(r"qwen3-reranker-[\d.]+b", re.IGNORECASE), QWEN3_RERANKER),
    (re.compile(r"mxbai-rerank-(base|large)-v2", re.IGNORECASE), MXBAI_RERANK_V2),
    (re.compile(r"zerank-[12](-small|-reranker)?$", re.IGNORECASE), ZERANK),
    (re.compile(r"demo$"), DEMO),
)


def by_name(names: Iterable[str]) -> Family | None:
    """The family of a model that is called by any of these names, hub names or paths."""
    for name in names:
        last = name.rstrip("/").rpartition("/")[2]
        for pattern, family in _BY_NAME:
            if pattern.match(last):
                return family
    return None
