"""The prompt families that gpuscore knows by name.

If a prompt differs by a single token from the prompt that a model was trained with, scores look
right and are wrong. So each entry has the prompt and formula of the model card, and the tests
compare its token ids with recorded ones.
"""

import re
from collections.abc import Iterable

from gpuscore.prompts.family import ONLY_CLASS, STRIPPED, PromptFamily

QWEN3_RERANKER = PromptFamily(
    name="qwen3-reranker",
    named=(r"qwen3-reranker-[\d.]+b", "Qwen3For"),
    source="https://huggingface.co/Qwen/Qwen3-Reranker-0.6B",
    parts=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n",
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    labels=("yes", "no"),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
MXBAI_RERANK_V2 = PromptFamily(
    name="mxbai-rerank-v2",
    named=(r"mxbai-rerank-(base|large)-v2", "Qwen2For"),
    source="https://github.com/mixedbread-ai/mxbai-rerank",
    parts=(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\n",
        "query: {query}",
        "\n",
        "document: {document}",
        "\n",
        "You are a search relevance expert who evaluates how "
        "well documents match search queries. For each query-document pair, carefully analyze the "
        "semantic relationship between them, then provide your binary relevance judgment (0 for "
        "not relevant, 1 for relevant).\nRelevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    labels=("1", "0"),
)
ZERANK = PromptFamily(
    name="zerank",
    named=(r"zerank-[12](-small)?(-reranker)?$", "Qwen3For"),
    source="https://huggingface.co/zeroentropy/zerank-1",
    parts=(
        "<|im_start|>",
        "system\n{query}",
        "<|im_end|>\n<|im_start|>",
        "user\n{document}",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    labels=("Yes",),
    scale=5.0,
    strip=STRIPPED,
)
DEMO = PromptFamily(
    name="demo",
    named=(r"(?-i:demo)$", ""),
    source="gpuscore/demo/README.md",
    parts=("query: {query}\nitem: {document}",),
    labels=("yes", "no"),
)

BGE_RERANKER_V2_GEMMA = PromptFamily(
    name="bge-reranker-v2-gemma",
    named=(r"bge-reranker-v2-gemma$", "GemmaFor"),
    source="https://huggingface.co/BAAI/bge-reranker-v2-gemma",
    parts=(
        "<bos>",
        "A: {query}",
        "\n",
        "B: {document}",
        "\n",
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'.",
    ),
    labels=("Yes",),
)
INSTRUCT = PromptFamily(
    name="instruct",
    source="docs/families.md",
    messages=(
        (
            "user",
            "{instruction}\n\nQuery: {query}\n\nDocument: {document}\n\nDoes the document meet the "
            'requirements? Answer only "yes" or "no".',
        ),
    ),
    labels=("yes", "no"),
    instruction="Judge whether a document is relevant to a query.",
    # Qwen3's template then lets the model answer without thinking; other templates ignore it.
    options={"add_generation_prompt": True, "enable_thinking": False},
    strip=STRIPPED,
)
QWEN3GUARD_GEN = PromptFamily(
    name="qwen3guard-gen",
    named=(r"qwen3guard-gen-[\d.]+b", "Qwen3For"),
    source="https://huggingface.co/Qwen/Qwen3Guard-Gen-0.6B",
    messages=(("user", "{document}"),),
    answering=(("user", "{query}"), ("assistant", "{document}")),
    answer="Safety:",
    labels=(" Safe", " Unsafe", " Controversial"),
    classes=("Safe", "Unsafe", "Controversial"),
)
LLAMA_GUARD_3 = PromptFamily(
    name="llama-guard-3",
    named=(r"llama-guard-3-[\d.]+b(?!.*vision)", "LlamaFor"),
    source="https://huggingface.co/meta-llama/Llama-Guard-3-8B",
    messages=(("user", "{document}"),),
    answering=(("user", "{query}"), ("assistant", "{document}")),
    answer="\n\n",
    labels=("safe", "unsafe"),
    classes=("safe", "unsafe"),
)
GRANITE_GUARDIAN = PromptFamily(
    name="granite-guardian",
    named=(r"granite-guardian-3\.[0-2]-", "GraniteFor"),
    source="https://github.com/ibm-granite/granite-guardian",
    messages=(("user", "{document}"),),
    answering=(("user", "{query}"), ("assistant", "{document}")),
    labels=("Yes", "No"),
    classes=("Yes", "No"),
    options={"add_generation_prompt": True},
)
REWARD = PromptFamily(
    name="reward",
    named=(r"skywork-reward-", ""),
    source="https://huggingface.co/Skywork/Skywork-Reward-V2-Qwen3-0.6B",
    messages=(("user", "{query}"), ("assistant", "{document}")),
    labels=(ONLY_CLASS,),
    activation="none",
    one_class=True,
)

_ALL = (
    *(QWEN3_RERANKER, MXBAI_RERANK_V2, BGE_RERANKER_V2_GEMMA, ZERANK, INSTRUCT),
    *(QWEN3GUARD_GEN, LLAMA_GUARD_3, GRANITE_GUARDIAN, REWARD, DEMO),
)
FAMILIES = {family.name: family for family in _ALL}
# The family of process reward models, such as https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B. It
# has no prompt for /rerank, because a text has a score for each step, read at STEP_TOKEN after it.
PRM = "prm"
STEP_TOKEN = "<extra_0>"


def names_of(ranks: bool) -> str:
    """Return the names of the families that rank, or of the guards, for an error."""
    return ", ".join(family.name for family in _ALL if family.ranks == ranks)


def by_name(names: Iterable[str], architecture: str) -> PromptFamily | None:
    """Return the family of a model by its names, hub names or paths; None if unknown."""
    for name in names:
        last = name.rstrip("/").rpartition("/")[2]
        for family in _ALL:
            if family.named is None:
                continue
            pattern, beginning = family.named
            if re.match(pattern, last, re.IGNORECASE) and architecture.startswith(beginning):
                return family
    return None
