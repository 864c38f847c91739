"""GGUF files of tiny models, written as llama.cpp's convert_hf_to_gguf.py writes them."""

import json
from pathlib import Path

import numpy as np
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quantize,
)
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from support.models import CORPUS, make_model

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL = ["<s>", "</s>", "<|turn|>"]
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
SIZE = 420  # of the vocabulary
GEMMA_LAYERS = 6  # the sixth of Gemma 3 has no window
OVERRIDES = {
    # Each differs from the defaults of transformers' class and from hidden_size / heads.
    "llama": {"mlp_bias": False, "head_dim": 16, "rope_parameters": None, "rope_theta": 5e5},
    "qwen2": {},
    "qwen3": {"head_dim": 20},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "num_hidden_layers": GEMMA_LAYERS,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}
ARCHITECTURES = tuple(OVERRIDES)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def byte_level(pre: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits as models of this `tokenizer.ggml.pre` do."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = {"llama-bpe": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT}
    if pre in splits:
        split = pre_tokenizers.Split(Regex(splits[pre]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        tokenizer.pre_tokenizer = gpt2
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, pre_tokenizers.ByteLevel.alphabet(), SPECIAL)
    if pre == "llama-bpe":
        tokenizer = _with_token(tokenizer, "\u0120lampshade")
        _add_bos(tokenizer)
    return tokenizer


def _with_token(tokenizer: Tokenizer, token: str) -> Tokenizer:
    """Return the tokenizer with a token that no merges make; Llama 3 has such tokens."""
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"][token] = tokenizer.get_vocab_size()
    return Tokenizer.from_str(json.dumps(content))


def sentencepiece(prefix: bool) -> Tokenizer:
    """Return a BPE tokenizer in SentencePiece's way, with <s> before every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), *steps] if prefix else steps
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(tokenizer, [], special)
    tokenizer.pre_tokenizer = None
    _add_bos(tokenizer)
    return tokenizer


def _train(tokenizer: Tokenizer, alphabet: list[str], special: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 10,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3 + ("a  1 b  2 c  3 d  4",) * 9, trainer)


def _add_bos(tokenizer: Tokenizer) -> None:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )


class GgufModel:
    """A tiny model of transformers and its GGUF file, which a test may change before `write`.

    Attributes:
        model: of transformers, in float32.
        tokenizer: that its authors would ship.
        fields: metadata by key, without the architecture.
        tensors: by name, in float32 and in llama.cpp's order.
        kinds: formats of tensors that are not float32.
    """

    def __init__(self, directory: Path, architecture: str, pre: str = "", **overrides: object):
        self.architecture, self.path = architecture, directory / "model.gguf"
        gemma = architecture.startswith("gemma")
        words = {"vocab_size": SIZE} | OVERRIDES[architecture] | overrides
        words = {name: value for name, value in words.items() if value is not None}
        if architecture == "llama" and "rope_parameters" not in words:
            words["rope_parameters"] = {"rope_type": "default", "rope_theta": words["rope_theta"]}
        self.model = make_model(directory / "original", architecture, **words)
        self.tokenizer = byte_level(pre) if pre else sentencepiece(prefix=not gemma)
        self.kinds: dict[str, GGMLQuantizationType] = {}
        self.raw: dict[str, np.ndarray] = {}
        self.fields = _fields(self.model.config, architecture) | _tokens(self.tokenizer, pre)
        if not pre:
            self.fields["tokenizer.ggml.add_space_prefix"] = not gemma
        self.tensors = _tensors(self.model, architecture)
        rope = self.model.config.rope_parameters
        if rope.get("rope_type") == "llama3":
            self.tensors["rope_freqs.weight"] = _divisors(rope, self.model.config.head_dim)

    def write(self) -> Path:
        """Write the file and return its path."""
        writer = GGUFWriter(self.path, self.architecture)
        for key, value in self.fields.items():
            _ADD[type(value)](writer)(key, value)
        for name, values in self.tensors.items():
            kind = self.kinds.get(name)
            if name in self.raw:
                writer.add_tensor(name, self.raw[name], raw_dtype=kind)
            elif kind is None:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path


_ADD = {
    bool: lambda writer: writer.add_bool,
    int: lambda writer: writer.add_uint32,
    float: lambda writer: writer.add_float32,
    str: lambda writer: writer.add_string,
    list: lambda writer: writer.add_array,
}


def _fields(config, name: str) -> dict[str, object]:
    head_dim = getattr(config, "head_dim", None) or 12
    fields = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.vocab_size": config.vocab_size,
    }
    rope = config.rope_parameters
    if name == "gemma3":
        rope = rope["full_attention"]
        fields[f"{name}.rope.scaling.type"] = "linear"
        fields[f"{name}.rope.scaling.factor"] = rope["factor"]
    if name == "gemma2":
        fields[f"{name}.attn_logit_softcapping"] = config.attn_logit_softcapping
        fields[f"{name}.final_logit_softcapping"] = config.final_logit_softcapping
    if name in ("gemma2", "gemma3"):
        fields[f"{name}.attention.sliding_window"] = config.sliding_window
    return fields | {f"{name}.rope.freq_base": float(rope["rope_theta"])}


def _tokens(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [_kind(token) for token in tokens]
    padding = [f"[PAD{number}]" for number in range(len(tokens), SIZE)]
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2" if pre else "llama",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": [*kinds, *[int(TokenType.UNUSED)] * len(padding)],
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.eos_token_id": vocabulary["</s>"],
        "tokenizer.chat_template": TEMPLATE,
    }
    if pre:
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        fields["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
        fields["tokenizer.ggml.pre"] = pre
    else:
        fields["tokenizer.ggml.scores"] = [-float(number) for number in range(SIZE)]
        fields["tokenizer.ggml.unknown_token_id"] = vocabulary["<unk>"]
    return fields


def _kind(token: str) -> int:
    if token in SPECIAL:
        return int(TokenType.CONTROL)
    if token == "<unk>":
        return int(TokenType.UNKNOWN)
    return int(TokenType.BYTE if token.startswith("<0x") else TokenType.NORMAL)


def _tensors(model, architecture: str) -> dict[str, np.ndarray]:
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, _, ending = name.rpartition(".")
        stored, values = names.get_name(base), parameter.float().numpy().copy()
        part = stored.rpartition(".")[2]
        if architecture == "llama" and part in heads:
            values = _permuted(values, heads[part])
        if architecture.startswith("gemma") and stored.endswith("norm"):
            values += 1
        tensors[f"{stored}.{ending}"] = values
    return tensors


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as convert_hf_to_gguf.py's LlamaModel.permute orders them."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape).copy()


def _divisors(rope: dict[str, float], head_dim: int) -> np.ndarray:
    """Return Llama 3.1's divisors as convert_hf_to_gguf.py computes them, one by one."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    divisors = []
    for pair in range(0, head_dim, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (pair / head_dim)
        if length < high:
            divisors.append(1.0)
        elif length > low:
            divisors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            share = rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]
            divisors.append(1 / ((1 - share / span) / rope["factor"] + share / span))
    return np.array(divisors, np.float32)
