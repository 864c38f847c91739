"""Every key of config.json that transformers reads for a supported model, and how it is handled.

A key is used; or it must have a value that changes nothing; or it changes no score, whatever its
value. Any other key is refused by name, because a newer transformers or another library may have
added it to change the model. `tests/backends/test_config_keys.py` compares this list with the
fields of transformers' own configuration classes, and its claims with transformers' logits.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import shown

logger = logging.getLogger(__name__)

# Keys of the decoder that all architectures share.
_USED = """
architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings
rope_parameters rope_scaling rope_theta layer_types dtype torch_dtype id2label num_labels
problem_type quantization_config compression_config is_original_qwen3_reranker
classifier_from_token method token_classification_bias
"""

# Key -> the values that change nothing, and what is supported. The first keys are common to many
# models; the last belong to other architectures, whose checkpoints are sometimes renamed to one of
# the supported ones.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "quantization": ((None,), "unquantised bfloat16, float16 or float32 weights"),
    "auto_map": ((None, {}), "remote code beside the model_type of a class in transformers"),
    "transformers_weights": ((None,), "weights in model.safetensors or its shards"),
    "per_layer_config": ((None, {}), "layers that are all of one kind"),
    # transformers takes an explicit null for "not causal".
    "is_causal": ((True,), "causal models"),
    "use_bidirectional_attention": ((None, False), "causal models"),
    "is_encoder_decoder": ((None, False), "decoders"),
    "hidden_act": ((None, "silu"), "silu"),
    "attn_output_gate": ((None, True), "attention's output gated, as in transformers"),
    "partial_rotary_factor": ((None, 1), "rotary embedding over the whole head"),
    "attn_logit_softcapping": ((None,), "attention without a soft-cap"),
    "final_logit_softcapping": ((None,), "logits without a soft-cap"),
    "pretraining_tp": ((None, 1), "pretraining_tp 1"),
    "sliding_window": ((None,), "attention to all tokens"),
    "use_sliding_window": ((None, False), "attention to all tokens"),
    "attention_chunk_size": ((None,), "attention to all tokens"),
    "attention_bias": ((None, False), "projections without a bias"),
    "mlp_bias": ((None, False), "projections without a bias"),
    "pruned_heads": ((None, {}), "models with all their heads"),
    "use_mrope": ((None, False), "one position per token"),
    "rope_interleaved": ((None, False), "rotary embedding of halves"),
    "use_qk_norm": ((None, False), "queries and keys as the architecture has them"),
    "qk_layernorm": ((None, False), "queries and keys as the architecture has them"),
    "no_rope_layers": ((None, []), "rotary embedding in every layer"),
    "embedding_multiplier": ((None, 1), "embeddings as they are"),
    "residual_multiplier": ((None, 1), "residuals as they are"),
    "logits_scaling": ((None, 1), "logits as they are"),
    "num_experts": ((None, 0), "models without experts"),
    "num_local_experts": ((None, 0), "models without experts"),
}

# Keys for training, generation, other tasks and other implementations of the same computation;
# notes of fine-tuning tools about themselves; keys that older transformers wrote into every file.
_NO_EFFECT = """
transformers_version chunk_size_feed_forward output_hidden_states output_attentions return_dict
use_return_dict label2id name_or_path use_cache attn_implementation experts_implementation
initializer_range gradient_checkpointing attention_dropout hidden_dropout classifier_dropout
embd_pdrop resid_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob dropout
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id
decoder_start_token_id bos_token eos_token pad_token unk_token tokenizer_class prefix torchscript
use_bfloat16 tf_legacy_loss tie_encoder_decoder is_decoder add_cross_attention
cross_attention_hidden_size finetuning_task task_specific_params unsloth_version unsloth_fixed
is_llama_config transformers.js_config sentence_transformers model_max_length max_sequence_length
seq_length trust_remote_code use_flash_attn use_flash_attention use_flash_attention_2
assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
cache_implementation constraints diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id
generation_config length_penalty max_length max_new_tokens min_length min_new_tokens
no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_scores penalty_alpha remove_invalid_values repetition_penalty
return_dict_in_generate sequence_bias stop_strings suppress_tokens target_lookbehind temperature
top_k top_p typical_p
"""

EVERY_USED = frozenset(_USED.split())
EVERY_NO_EFFECT = frozenset(_NO_EFFECT.split())


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a single architecture has.

    Args:
        model_type: its name in transformers.
        used: keys that its module reads.
        no_effect: keys of its models that change no score.
    """

    model_type: str
    used: frozenset[str]
    no_effect: frozenset[str] = field(default_factory=frozenset)


_WINDOW = "sliding_window use_sliding_window max_window_layers"
_GEMMA = "attention_bias hidden_activation"
_GEMMA2 = f"{_GEMMA} sliding_window query_pre_attn_scalar final_logit_softcapping"

_FAMILIES: Mapping[str, tuple[str, str, str]] = {
    "Qwen2": ("qwen2", _WINDOW, "attention_bias"),
    "Qwen3": ("qwen3", f"{_WINDOW} attention_bias", ""),
    "Qwen3Moe": (
        "qwen3_moe",
        "sliding_window use_sliding_window attention_bias num_experts num_local_experts "
        "num_experts_per_tok decoder_sparse_step mlp_only_layers moe_intermediate_size "
        "norm_topk_prob",
        "max_window_layers output_router_logits router_aux_loss_coef",
    ),
    "Qwen3_5": (
        "qwen3_5_text",
        "partial_rotary_factor full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads",
        "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings mlp_only_layers",
    ),
    "Llama": ("llama", "attention_bias mlp_bias", ""),
    "Mistral": ("mistral", "sliding_window", "use_sliding_window"),
    "Granite": (
        "granite",
        "attention_bias mlp_bias embedding_multiplier residual_multiplier attention_multiplier "
        "logits_scaling",
        "",
    ),
    "Gemma": ("gemma", f"{_GEMMA} hidden_act", ""),
    "Gemma2": ("gemma2", f"{_GEMMA2} attn_logit_softcapping", "hidden_act"),
    "Gemma3": (
        "gemma3_text",
        f"{_GEMMA2} sliding_window_pattern rope_local_base_freq",
        "hidden_act boi_token_index eoi_token_index image_token_index mm_tokens_per_image",
    ),
}
KEYS: Mapping[str, Keys] = {
    name: Keys(model_type, frozenset(used.split()), frozenset(no_effect.split()))
    for name, (model_type, used, no_effect) in _FAMILIES.items()
}

# transformers' values of absent keys, if they are neither what null means nor the defaults of
# `hf_config`. A file without a key is read as if it had this value.
_WINDOW_LENGTH = {"sliding_window": 4096}
ABSENT: Mapping[str, Mapping[str, Any]] = {
    "Qwen2": {"num_key_value_heads": 32, **_WINDOW_LENGTH},
    "Qwen3": {"num_key_value_heads": 32, **_WINDOW_LENGTH},
    "Qwen3Moe": {"num_key_value_heads": 4, **_WINDOW_LENGTH},
    "Qwen3_5": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "Llama": {},
    "Mistral": {"num_key_value_heads": 8, **_WINDOW_LENGTH},
    "Granite": {},
    "Gemma": {"num_key_value_heads": 16},
    "Gemma2": {"num_key_value_heads": 4, **_WINDOW_LENGTH},
    "Gemma3": {"num_key_value_heads": 4, **_WINDOW_LENGTH},
}


def with_absent(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json, completed with the fields that transformers would add."""
    return {**ABSENT[_family(architecture)], **fields}


def keys_of(architecture: str) -> Keys:
    """Return the keys of an architecture, given a name such as LlamaForCausalLM."""
    return KEYS[_family(architecture)]


def _family(architecture: str) -> str:
    return architecture.partition("For")[0].removesuffix("Text")


def verdict(architecture: str, name: str) -> str:
    """Return how a key is handled: "used", "neutral", "no effect" or "unknown"."""
    keys = keys_of(architecture)
    if name in keys.used or name in EVERY_USED:
        return "used"
    # transformers writes names with a leading underscore for itself and never reads them.
    if name in keys.no_effect or name in EVERY_NO_EFFECT or name.startswith("_"):
        return "no effect"
    return "neutral" if name in NEUTRAL or name == "model_type" else "unknown"


def refuse_unsupported(architecture: str, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the key, for any setting that would give wrong scores."""
    _check_model_type(architecture, fields.get("model_type"))
    native = fields.get("model_type") == keys_of(architecture).model_type
    for name, value in fields.items():
        if name == "auto_map" and native and value:
            logger.warning(
                "config.json: auto_map is ignored, as transformers ignores it without "
                "trust_remote_code: the model is served as its own %s",
                architecture,
            )
            continue
        match verdict(architecture, name):
            case "neutral" if name in NEUTRAL:
                harmless, supported = NEUTRAL[name]
                if value not in harmless:
                    text = "a value" if isinstance(value, dict) else shown(value)
                    raise ConfigError(f"config.json: {name} is {text}; supported: {supported}")
            case "unknown" if value is not None:
                raise ConfigError(
                    f"config.json: {shown(name)} is {shown(value)}, a key that {architecture} is "
                    "not known to have and that could change scores; supported: keys of "
                    "transformers' configuration; delete it if the model does without it"
                )


def _check_model_type(architecture: str, model_type: object) -> None:
    """Refuse a `model_type` of another architecture: transformers chooses the model by it."""
    expected = keys_of(architecture).model_type
    if model_type not in (None, expected):
        raise ConfigError(
            f"config.json: model_type is {shown(model_type)} and architectures {architecture}, "
            f"which are different models; supported: {expected}"
        )
