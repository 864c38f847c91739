"""The prompt families that gpuscore knows by name.

If a prompt differs by a single token from the prompt that a model was trained with, scores look
right and are wrong. So each entry has the prompt and formula of the model card, and the tests
compare its token ids with recorded ones.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gpuscore.prompts.chat import Messages
from gpuscore.prompts.family import ONLY_CLASS, STRIPPED, Family, PromptFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily(Family):
    """A family whose prompt is made by the model's own chat template.

    `strip` is white space around texts that is dropped even if the template keeps it.

    Args:
        messages: the conversation, whose contents have the fields of a family's parts.
        answering: a guard's conversation for a text that answers a query.
        answer: the beginning of the model's answer, before the label.
        options: variables of the template, such as add_generation_prompt.
    """

    messages: Messages
    answering: Messages = ()
    answer: str = ""
    options: Mapping[str, object] = field(default_factory=dict)


QWEN3_RERANKER = PromptFamily(
    name="qwen3-reranker",
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
    source="gpuscore/demo/README.md",
    parts=("query: {query}\nitem: {document}",),
    labels=("yes", "no"),
)

BGE_RERANKER_V2_GEMMA = PromptFamily(
    name="bge-reranker-v2-gemma",
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
INSTRUCT = ChatFamily(
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
QWEN3GUARD_GEN = ChatFamily(
    name="qwen3guard-gen",
    source="https://huggingface.co/Qwen/Qwen3Guard-Gen-0.6B",
    messages=(("user", "{document}"),),
    answering=(("user", "{query}"), ("assistant", "{document}")),
    answer="Safety:",
    labels=(" Safe", " Unsafe", " Controversial"),
    classes=("Safe", "Unsafe", "Controversial"),
)
LLAMA_GUARD_3 = ChatFamily(
    name="llama-guard-3",
    source="https://huggingface.co/meta-llama/Llama-Guard-3-8B",
    messages=(("user", "{document}"),),
    answering=(("user", "{query}"), ("assistant", "{document}")),
    answer="\n\n",
    labels=("safe", "unsafe"),
    classes=("safe", "unsafe"),
)
REWARD = ChatFamily(
    name="reward",
    source="https://huggingface.co/Skywork/Skywork-Reward-V2-Qwen3-0.6B",
    messages=(("user", "{query}"), ("assistant", "{document}")),
    labels=(ONLY_CLASS,),
    activation="none",
    one_class=True,
)

AnyFamily: TypeAlias = PromptFamily | ChatFamily
_ALL: tuple[AnyFamily, ...] = (
    *(QWEN3_RERANKER, MXBAI_RERANK_V2, BGE_RERANKER_V2_GEMMA, ZERANK, INSTRUCT),
    *(QWEN3GUARD_GEN, LLAMA_GUARD_3, REWARD, DEMO),
)
FAMILIES: dict[str, AnyFamily] = {family.name: family for family in _ALL}


def names_of(ranks: bool) -> str:
    """Return the names of the families that rank, or of the guards, for an error."""
    return ", ".join(family.name for family in _ALL if ranks != bool(family.classes))


# (pattern for the model's name without its owner, beginning of its architecture, family).
# Conversions add to the name.
_BY_NAME: tuple[tuple[str, str, AnyFamily], ...] = (
    (r"qwen3-reranker-[\d.]+b", "Qwen3For", QWEN3_RERANKER),
    (r"mxbai-rerank-(base|large)-v2", "Qwen2For", MXBAI_RERANK_V2),
    (r"zerank-[12](-small)?(-reranker)?$", "Qwen3For", ZERANK),
    (r"bge-reranker-v2-gemma$", "GemmaFor", BGE_RERANKER_V2_GEMMA),
    (r"qwen3guard-gen-[\d.]+b", "Qwen3For", QWEN3GUARD_GEN),
    (r"llama-guard-3-[\d.]+b(?!.*vision)", "LlamaFor", LLAMA_GUARD_3),
    (r"skywork-reward-", "", REWARD),
    (r"(?-i:demo)$", "", DEMO),
)


def by_name(names: Iterable[str], architecture: str) -> AnyFamily | None:
    """Return the family of a model by its names, hub names or paths; None if unknown."""
    for name in names:
        last = name.rstrip("/").rpartition("/")[2]
        for pattern, beginning, family in _BY_NAME:
            if re.match(pattern, last, re.IGNORECASE) and architecture.startswith(beginning):
                return family
    return None
