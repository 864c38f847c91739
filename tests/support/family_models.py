"""A tiny random model of every prompt family, with the pairs of texts that it is asked about.

tests/fixtures/families has what the authors' code makes of them; `python -m fixtures.families`
makes that anew, with whole vocabularies. Tests read the part of a vocabulary that is needed.
"""

import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import gpuscore
from support.models import make_model

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "families"
PAIRS, SCORED, WHOLE = 300, 5, 3  # pairs; the first ones with a score, and with all their ids
SENTENCES = (
    "What is the capital of France", "how do I reset a forgotten password",
    "Ist der Stuhl aus Holz",
    "The chair is made of oak and weighs 4.5 kg", "Paris has been its capital since 987",
    "Click \"forgot password\" and follow the link", "Le café ouvre à 7 h 30", "北京是中国的首都",
    "def area(r): return 3.14159 * r ** 2", "She said: it's done, isn't it",
    "- one\n- two\n- three",
    "La batería dura doce horas", "Вода кипит при ста градусах", "https://example.org/a?b=c&d=1",
    "Returns are free within 30 days", "a", "I can't find my order #48-2213",
    "日本の一番高い山は富士山です",
)  # fmt: skip
ENDS = ("", ".", "?", "!", "...", ":", ";", ")", '"', "。", " ", "  ", "\n", "\n\n", ".\n", "? \n")
ENDS += ("!\n\n", "\t", "\r\n", " -", ".)", "”", "|", ">")
STARTS = ("", "", "", " ", "\n", "\n\n", "\t", "- ", "(")

# They render a conversation as the models' own templates do; the guards' policies are shorter.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' + m.content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>'"
    " + '\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
)
LLAMA_GUARD = (
    "{{ bos_token }}{{ '<|start_header_id|>user<|end_header_id|>\n\nTask: judge the last message by"
    " the policy.\n\n<BEGIN CONVERSATION>\n\n' }}{% for m in messages %}"
    "{{ m.role | capitalize + ': ' + m.content | trim + '\n\n' }}{% endfor %}"
    "{{ '<END CONVERSATION><|eot_id|><|start_header_id|>assistant<|end_header_id|>' }}"
)
QWEN_GUARD = (
    "{{ '<|im_start|>user\nIs the last message safe?\n\n<BEGIN CONVERSATION>\n\n' }}"
    "{% for m in messages %}{{ m.role | upper + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{{ '<END CONVERSATION><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)
# As Granite Guardian 3's template: the last message is judged, in a turn of the template's own.
GRANITE_GUARD = (
    "{%- set last = messages[-1] %}{{- '<|im_start|>user\nHelp to determine whether the ' }}"
    "{{- last.role + ' message is harmful.\n\n<start_of_conversation>\nUser Message: ' }}"
    "{%- if messages | length > 1 %}{{- messages[-2].content + '\nAssistant Message: ' }}"
    "{%- endif %}{{- last.content + '\n<end_of_conversation>\n\n* harmful by common sense\n\n' }}"
    "{{- 'Your answer must be either Yes or No.<|im_end|>\n' }}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
ROLES = (
    "{% for m in messages %}{{ '<|im_start|>' + {'system': 'system', 'query': 'user', 'document':"
    " 'tool'}[m.role] + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "(messages | selectattr('role', 'eq', '{}') | map(attribute='content') | first | default(''))"
)
_SYSTEM, _QUERY, _DOCUMENT = (_TEXT.format(role) for role in ("system", "query", "document"))
# The document first, as ContextualAI's reranker has it, and the instruction last.
LATE = (
    f"{{{{ '<|im_start|>user\nDocument: ' + {_DOCUMENT} + '\nQuery: ' + {_QUERY} | trim }}}}"
    f"<|im_end|>\n<|im_start|>system\n{{{{ {_SYSTEM} }}}}<|im_end|>\n<|im_start|>assistant\n"
)
TWICE = (
    f"<|im_start|>user\n{{{{ {_SYSTEM} }}}}\nQ: {{{{ {_QUERY} }}}}\nD: {{{{ {_DOCUMENT} }}}}"
    f"\nAgain: {{{{ {_QUERY} }}}}<|im_end|>\n<|im_start|>assistant\n"
)
# A structured template, as of models of text and pictures: contents are lists of pieces. It reads a
# plain text, too, and makes another prompt of it.
PIECES = (
    "{% macro text(c) %}{% if c is string %}text: {{ c }}{% else %}{% for p in c %}{{ p.text }}"
    "{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ '<|im_start|>' + {'query':"
    " 'user', 'document': 'tool'}.get(m.role, m.role) + '\n' + text(m.content) | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
MODULE = "sentence_transformers.{}.modules.{}.{}"
YES, NO = 9693, 2152  # Qwen's tokens
ST_FILES = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "",
         "type": MODULE.format("base", "transformer", "Transformer")},
        {"idx": 1, "name": "1", "path": "1_LogitScore",
         "type": MODULE.format("cross_encoder", "logit_score", "LogitScore")},
    ],
    "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": NO},
    "config_sentence_transformers.json": {
        "model_type": "CrossEncoder", "prompts": {"web": "Judge the tool's answer. "},
        "default_prompt_name": "web", "activation_fn": "torch.nn.modules.linear.Identity",
    },
    "sentence_bert_config.json": {
        "transformer_task": "text-generation",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "logits"},
            "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
        },
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    },
}  # fmt: skip

_BERT = "sentence_bert_config.json"
_KINDS = ST_FILES[_BERT]["modality_config"]
_PIECES = {"modality_config": _KINDS | {"message": _KINDS["message"] | {"format": "structured"}}}
ST_PIECES = ST_FILES | {_BERT: ST_FILES[_BERT] | _PIECES}

# A model with a head of one class has no module that reads tokens.
ST_CLASS = {
    "modules.json": ST_FILES["modules.json"][:1],
    "config_sentence_transformers.json": {
        "model_type": "CrossEncoder", "prompts": {"web": "Judge it."}, "default_prompt_name": "web",
    },
    "sentence_bert_config.json": {
        "transformer_task": "sequence-classification",
        "modality_config": ST_FILES["sentence_bert_config.json"]["modality_config"],
        "module_output_name": "scores",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """The rows of a model's embedding, and the special tokens of its tokenizer_config.json."""

    rows: int
    tokens: Mapping[str, str]


QWEN_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
VOCABULARIES = {
    "qwen": Vocabulary(151_936, QWEN_TOKENS),
    "llama3": Vocabulary(128_256, LLAMA_TOKENS | {"pad_token": "<|eot_id|>"}),
    "gemma": Vocabulary(32_784, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<unk>"}),
}


@dataclass(frozen=True)
class Case:
    """A family's model.

    Args:
        model: of support.models.
        vocabulary: of VOCABULARIES.
        template: the chat template.
        family: `--family`.
        files: other files, as JSON.
        head: of config.json.
        raw: the reference gives raw scores.
    """

    model: str
    vocabulary: str
    template: str = ""
    family: str = ""
    files: Mapping[str, Any] = field(default_factory=dict)
    head: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False


ONE_CLASS = {"id2label": {0: "reward"}}
EOT = 128_006  # <|eot_id|> in support.real_vocabularies
CASES = {
    "qwen3-reranker": Case("qwen3", "qwen"),
    "mxbai-rerank-v2": Case("qwen2", "qwen", raw=True),
    "bge-reranker-v2-gemma": Case("gemma", "gemma"),
    "zerank": Case("qwen3", "qwen", QWEN3),
    "instruct": Case("qwen3", "qwen", QWEN3),
    "reward": Case("qwen3_classes", "qwen", QWEN3, head=ONE_CLASS),
    "reward-padded": Case(
        "llama_classes", "llama3", LLAMA3, "reward", head=ONE_CLASS | {"pad_token_id": EOT}
    ),
    "qwen3guard-gen": Case("qwen3", "qwen", QWEN_GUARD),
    "llama-guard-3": Case("llama", "llama3", LLAMA_GUARD),
    "granite-guardian": Case("granite", "qwen", GRANITE_GUARD),
    "demo": Case("", ""),
    "sentence-transformers": Case("qwen3", "qwen", ROLES, "auto", files=ST_FILES),
    "sentence-transformers-late": Case("qwen3", "qwen", LATE, "auto", files=ST_FILES),
    "sentence-transformers-twice": Case("qwen3", "qwen", TWICE, "auto", files=ST_FILES),
    "sentence-transformers-structured": Case("qwen3_5", "qwen", PIECES, "auto", files=ST_PIECES),
    "sentence-transformers-class": Case(
        "qwen3_classes", "qwen", ROLES, "auto", files=ST_CLASS, head=ONE_CLASS
    ),
}
GUARDS = ("qwen3guard-gen", "llama-guard-3", "granite-guardian")


def pairs() -> list[tuple[str, str]]:
    """Return PAIRS of a query and a document, with all kinds of beginnings and ends."""
    rng = random.Random(53)

    def text() -> str:
        words = " ".join(rng.choice(SENTENCES) for _ in range(rng.choice((1, 1, 2))))
        return rng.choice(STARTS) + words + rng.choice(ENDS)

    return [(text(), text()) for _ in range(PAIRS)]


def make_directory(directory: Path, name: str, tokenizer: Tokenizer | None = None) -> Path:
    """Write a family's model; without a tokenizer, with the fixtures' part of its vocabulary."""
    if name == "demo":
        return shutil.copytree(Path(gpuscore.__file__).parent / "demo", directory)
    case = CASES[name]
    directory.mkdir()
    vocabulary = VOCABULARIES[case.vocabulary]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": vocabulary.rows}
    if case.model == "qwen3_5":
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    tied = not case.head
    make_model(directory, case.model, tie_word_embeddings=tied, **sizes, **case.head)
    if tokenizer is None:
        tokenizer = Tokenizer.from_buffer(
            gzip.decompress((FOLDER / f"{case.vocabulary}.json.gz").read_bytes())
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(vocabulary.tokens)
    for file, content in ({"tokenizer_config.json": settings} | dict(case.files)).items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(json.dumps(content))
    if case.template:
        (directory / "chat_template.jinja").write_text(case.template)
    return directory


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()[:8]
