"""config.json of a GGUF file: transformers' reading of it, completed and checked.

transformers (5.24) ignores the head sizes, RoPE's scaling and Gemma's soft caps in these files, and
uses the defaults of its classes, which fit one model of each kind. A file with a key that is not
known here is refused. Rules for which files have no key are llama.cpp's (src/llama-model.cpp).
"""

from typing import Any

import numpy as np

from gpuscore.commands.convert.gguf_file import GgufFile
from gpuscore.errors import UsageError

# llama.cpp's name -> the class of transformers.
CLASSES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# key -> attribute of the configuration, for all architectures; every file must have them.
_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_THETA, _SCALING, _FACTOR = "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"
_WINDOW = "attention.sliding_window"
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# rope.scaling.finetuned says how the model was trained, and changes nothing.
_KNOWN = {*_INTEGERS, _EPSILON, *_HEAD_SIZES, _THETA, _SCALING, _FACTOR, "vocab_size"}
_KNOWN |= {"rope.scaling.finetuned"}
_KNOWN_OF = {"gemma2": {_WINDOW, *_CAPS}, "gemma3": {_WINDOW, "final_logit_softcapping"}}
ROPE_FREQS = "rope_freqs.weight"  # Llama 3.1's scaling: a divisor of every frequency
# The parameters of every Llama 3.1 to 3.3 but the factor: "Llama 3.1" in transformers' rope utils.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LOCAL_THETA = 10000.0  # of Gemma 3's layers with a window, and of files that do not say it
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models


def check_architecture(file: GgufFile) -> None:
    """Refuse an architecture or a key of it that is not known, and a size that is missing.

    Raises:
        UsageError: always names what was found.
    """
    name = file.architecture
    if name not in CLASSES:
        raise UsageError(
            f"{file.path} has the architecture {name!r:.60}; supported: {', '.join(CLASSES)}"
        )
    known = _KNOWN | _KNOWN_OF.get(name, set())
    for key in file.metadata:
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in known:
            raise UsageError(f"{file.path} has the key {key!r:.100}, whose effect is not supported")
    for key in _INTEGERS:
        _positive(file, key)


def complete(config: Any, file: GgufFile) -> None:
    """Set the file's values in transformers' configuration.

    Raises:
        UsageError: a value is missing or not supported.
    """
    name = file.architecture
    config.architectures = [CLASSES[name]]
    for key, attribute in _INTEGERS.items():
        setattr(config, attribute, _positive(file, key))
    if config.num_hidden_layers > len(file.tensors):
        raise UsageError(
            f"{file.path} has {len(file.tensors)} tensors for {config.num_hidden_layers:,} layers"
        )
    config.rms_norm_eps = file.of_type(f"{name}.{_EPSILON}", float)
    config.head_dim = _head_size(file, config)
    config.tie_word_embeddings = "output.weight" not in file.tensors
    if "token_embd.weight" in file.tensors:
        config.vocab_size = file.tensors["token_embd.weight"].shape[0]
    config.rope_parameters = _rope(file, config.head_dim)
    if name in _LARGEST:
        _complete_gemma(config, file)


def _complete_gemma(config: Any, file: GgufFile) -> None:
    name = file.architecture
    config.sliding_window = _positive(file, _WINDOW)
    for key, attribute in _CAPS.items():
        if f"{name}.{key}" in file.metadata:
            setattr(config, attribute, file.of_type(f"{name}.{key}", float))
    largest = config.num_hidden_layers == _LARGEST[name]
    per_head = config.hidden_size // config.num_attention_heads
    config.query_pre_attn_scalar = per_head if largest else config.head_dim
    if name == "gemma3":
        local = {"rope_type": "default", "rope_theta": _LOCAL_THETA}
        config.rope_parameters = {
            "full_attention": config.rope_parameters,
            "sliding_attention": local,
        }


def _positive(file: GgufFile, key: str) -> int:
    value = file.of_type(f"{file.architecture}.{key}", int)
    if value < 1:
        raise UsageError(f"{file.path}: {file.architecture}.{key} is {value}")
    return int(value)


def _head_size(file: GgufFile, config: Any) -> int:
    whole = config.hidden_size // config.num_attention_heads
    named = {
        key: _positive(file, key)
        for key in _HEAD_SIZES
        if f"{file.architecture}.{key}" in file.metadata
    }
    sizes = set(named.values()) or {whole}
    if len(sizes) > 1:
        raise UsageError(
            f"{file.path} has heads of several sizes ({named}), or turns a part of each; "
            "supported: one size"
        )
    return sizes.pop()


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    name, metadata = file.architecture, file.metadata
    key = f"{name}.{_THETA}"
    theta = file.of_type(key, float) if key in metadata else _LOCAL_THETA
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaling = metadata.get(f"{name}.{_SCALING}", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": file.of_type(f"{name}.{_FACTOR}", float)}
    elif scaling != "none":
        raise UsageError(f"{file.path} scales RoPE by {scaling!r:.60}; supported: none, linear")
    if ROPE_FREQS not in file.tensors:
        return rope
    if scaling != "none":
        raise UsageError(f"{file.path} scales RoPE by {ROPE_FREQS} and by {scaling}")
    return rope | _llama3(file, rope["rope_theta"], head_dim)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return Llama 3.1's scaling, if its divisors equal the file's."""
    stored = file.values(ROPE_FREQS)
    factor = float(stored.max())
    low, high, original = _LLAMA3.values()
    lengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)  # of the waves
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != wanted.shape or not np.allclose(stored, wanted, rtol=1e-4):
        raise UsageError(f"{file.path} scales RoPE by {ROPE_FREQS}, but not as Llama 3.1 does")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
