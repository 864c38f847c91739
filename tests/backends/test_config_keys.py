"""Promise: every key of config.json is used, checked, or known to change nothing.

tests/hostile/test_config_sweep.py compares all of them with transformers, at many values.
"""

import inspect
import json
import re
from dataclasses import fields
from importlib import import_module

import numpy as np
import pytest
from transformers import GenerationConfig, PreTrainedConfig, configuration_utils
from transformers import modeling_rope_utils as rope_utils

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.config_keys import KEYS, NEUTRAL, keys_of, refuse_unsupported, verdict
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.errors import ConfigError
from support.models import FAMILIES, make_model
from support.served_by_transformers import CLOSE, changed, difference, ours, theirs

ARCHITECTURES = {model.__name__: config for config, model, _ in FAMILIES.values()}
# Keys that today's transformers does not have for a family, and why the table still lists them.
OLD = {
    ("Qwen2", "attention_bias"): "its projections always have one",
    ("Qwen3Moe", "max_window_layers"): "in the hub's files",
    ("Mistral", "use_sliding_window"): "of files made from Qwen's",
    ("Qwen3_5", "mamba_ssm_dtype"): "in the hub's files; ours computes states in float32 anyway",
    ("Qwen3_5", "mtp_num_hidden_layers"): "in the hub's files, of a part that predicts more tokens",
    ("Qwen3_5", "mtp_use_dedicated_embeddings"): "in the hub's files, of the same part",
    ("Qwen3_5", "mlp_only_layers"): "in the hub's files; without experts every layer has an MLP",
    ("Gemma", "hidden_activation"): "in the hub's files, beside hidden_act",
}


def test_every_architecture_has_its_keys():
    assert {name.partition("For")[0] for name in ARCHITECTURES} == set(KEYS)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_new_field_of_transformers_is_seen(architecture):
    """Fail when a transformers release adds a field: find out what it does and give it a row."""
    config = ARCHITECTURES[architecture]
    assert config.model_type == keys_of(architecture).model_type
    names = {field.name for field in fields(config)} | set(config.attribute_map)
    names |= set(config.attribute_map.values())
    names |= set(GenerationConfig._get_default_generation_params())
    unknown = {name for name in names if verdict(architecture, name) == "unknown"}
    assert not unknown


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_no_row_is_stale(architecture):
    name, keys = architecture.partition("For")[0], keys_of(architecture)
    module = inspect.getmodule(ARCHITECTURES[architecture])
    model = import_module(module.__name__.replace("configuration_", "modeling_"))
    sources = "".join(map(inspect.getsource, (module, model, configuration_utils, rope_utils)))
    words = set(re.findall(r"\w+", sources))
    unused = {(name, key) for key in (keys.used | keys.no_effect) - words}
    assert unused == {row for row in OLD if row[0] == name}


def test_the_base_class_has_no_field_beside():
    for field in fields(PreTrainedConfig):
        assert verdict("LlamaForCausalLM", field.name) != "unknown"


SIZES = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# The other keys of files as they are on the hub, with their values.
HUB = {
    "Qwen3-Reranker-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        **{"model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu"},
        **{"max_window_layers": 28, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": None, "tie_word_embeddings": True, "transformers_version": "4.51.3"},
        "use_sliding_window": False,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **{"model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1},
        **{"head_dim": 128, "hidden_act": "silu", "max_window_layers": 48, "mlp_only_layers": []},
        **{"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128},
        **{"num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None},
        **{"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None},
        **{"use_sliding_window": False, "tie_word_embeddings": False},
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        **{"model_type": "qwen2", "hidden_act": "silu", "max_window_layers": 24},
        **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
        **{"use_mrope": False, "use_sliding_window": False, "transformers_version": "4.40.1"},
    },
    "mxbai-rerank-base-v2": {
        "architectures": ["Qwen2ForCausalLM"],
        **{"_name_or_path": "x", "model_type": "qwen2", "hidden_act": "silu"},
        **{"max_window_layers": 24, "rope_scaling": None, "rope_theta": 1000000.0},
        **{"sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False},
        "_attn_implementation_autoset": True,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        **{"model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu"},
        **{"mlp_bias": False, "pretraining_tp": 1, "rope_scaling": LLAMA3, "rope_theta": 500000.0},
        **{"tie_word_embeddings": True, "eos_token_id": [128001, 128008]},
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        **{"model_type": "llama", "attention_bias": False, "hidden_act": "silu"},
        **{"is_llama_config": True, "mlp_bias": False, "pretraining_tp": 1},
        **{"rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000},
        **{"tie_word_embeddings": True, "transformers.js_config": {"dtype": "q4"}},
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        **{"model_type": "mistral", "hidden_act": "silu", "rope_theta": 10000.0},
        **{"sliding_window": 4096, "tie_word_embeddings": False},
    },
    "bge-reranker-v2-gemma": {
        "architectures": ["GemmaForCausalLM"],
        **{"model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu"},
        **{"rope_scaling": None, "rope_theta": 10000.0, "pad_token_id": 0},
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        **{"model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256},
        **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
        **{"query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096},
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        **{"model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256},
        **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
        **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "eos_token_id": [1, 106]},
    },
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        **{"model_type": "qwen3_5", "image_token_id": 248056, "video_token_id": 248057},
        **{"vision_start_token_id": 248053, "vision_end_token_id": 248054},
        **{"tie_word_embeddings": True, "vision_config": {"depth": 12, "hidden_size": 768}},
        "text_config": {
            **SIZES,
            **{"model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True},
            **{"full_attention_interval": 2, "head_dim": 256, "hidden_act": "silu"},
            **{"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": []},
            **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "dtype": "bfloat16"},
            **{
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 16,
                "mtp_num_hidden_layers": 1,
            },
            **{"linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"},
            **{"mtp_use_dedicated_embeddings": False, "tie_word_embeddings": True},
            "rope_parameters": {
                **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 1e7},
                **{"partial_rotary_factor": 0.25, "rope_type": "default"},
            },
        },
    },
    "a fine-tune": {
        "architectures": ["Qwen3ForSequenceClassification"],
        **{"model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "problem_type": None},
        **{"id2label": {"0": "x"}, "label2id": {"x": 0}, "unsloth_version": "2025.1"},
        **{"unsloth_fixed": True, "max_window_layers": 28, "use_sliding_window": False},
        **{"sentence_transformers": {"version": "5.0"}, "_name_or_path": "x", "temperature": 0.6},
        **{"layer_types": ["full_attention"] * 2, "rope_theta": 1000000, "dtype": "bfloat16"},
    },
}


@pytest.mark.parametrize("name", HUB)
def test_files_of_the_hub_are_served(name):
    sizes = {} if "text_config" in HUB[name] else SIZES
    family = read_architecture(RawConfig(sizes | HUB[name]))
    assert family.config.architecture == HUB[name]["architectures"][0]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "qwen3"
    make_model(directory)
    return directory, json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear", "factor": 2.0}, "rope_parameters and rope_scaling differ"),
        ({"type": "default"}, "rope_parameters and rope_scaling differ"),  # with another theta
        ({"rope_type": "yarn", "factor": 4.0}, "rope_parameters and rope_scaling differ"),
    ],
)
def test_two_ropes(qwen3, scaling, message):
    """transformers prefers the old key, which files written by transformers 5 do not have."""
    directory, base = qwen3
    changed(directory, base, {"rope_scaling": scaling})
    assert message in ours(directory)


def test_two_ropes_alike(qwen3):
    directory, base = qwen3
    changed(directory, base, {"rope_scaling": base["rope_parameters"]})
    apart = difference(directory)
    assert apart is not None
    assert apart < CLOSE


def test_remote_code_beside_a_native_class_is_ignored(qwen3, caplog):
    """transformers ignores it without trust_remote_code."""
    directory, base = qwen3
    remote = {"AutoConfig": "configuration.C", "AutoModelForCausalLM": "modeling.M"}
    changed(directory, base, {"auto_map": remote})
    apart = difference(directory)
    assert apart is not None
    assert apart < CLOSE
    assert "auto_map is ignored" in caplog.text


def test_all_that_has_no_effect_at_once(qwen3):
    directory, base = qwen3
    changed(directory, base, {})
    expected = theirs(directory)
    names = ("attention_dropout", "_x", "bos_token_id")
    names += ("classifier_dropout", "temperature", "unsloth_fixed", "is_decoder", "seq_length")
    odd = {name: 0.7 if "dropout" in name else 3 for name in names}
    changed(directory, base, odd | {"initializer_range": 0.5, "use_cache": False})
    apart = difference(directory)
    assert apart is not None
    assert apart < CLOSE
    assert np.array_equal(theirs(directory), expected)


@pytest.mark.parametrize("name", [*NEUTRAL, "something_new", "use_rope"])
def test_what_could_change_scores_is_refused_by_name(name):
    for architecture in ARCHITECTURES:
        if verdict(architecture, name) in ("neutral", "unknown"):
            with pytest.raises(ConfigError, match=f"config.json: '?{name}'? is 'x'"):
                refuse_unsupported(architecture, {name: "x"})
