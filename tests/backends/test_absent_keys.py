"""Promise: a key that config.json leaves out, or has as null, means what it means in transformers,
or is refused by name."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gpuscore import Scorer
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.ropes import Llama3Rope, Rope
from gpuscore.errors import ConfigError
from support.models import CLASSIFIERS, COMMON, FAMILIES, make_model, random_ids, reference_logprobs

from .test_config_keys import HUB, LLAMA3, SIZES

FULL, SLIDING = "full_attention", "sliding_attention"
# Values that no architecture has by default, as transformers 5 writes them and as the hub has them.
WINDOWED = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": WINDOWED | {"attention_bias": True},
    "qwen2": WINDOWED,
    "qwen3_moe": {"sliding_window": 7, "use_sliding_window": True, "decoder_sparse_step": 2},
    "mistral": {"sliding_window": 7},
    "llama": {"attention_bias": True},
    "gemma": {"attention_bias": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {"final_logit_softcapping": 9.0},
}
# In errors another key may be named that the absent one was read for.
ALSO = {
    "num_hidden_layers": "layer_types",
    "use_sliding_window": "layer_types",
    "layer_types": "use_sliding_window",
    "id2label": "num_labels",
}


def files() -> Iterator[tuple[str, dict[str, Any]]]:
    for family, (config, model, special) in (FAMILIES | CLASSIFIERS).items():
        made = COMMON | special | OWN.get(family, {})
        written = config(architectures=[model.__name__], **made).to_json_string(use_diff=False)
        yield family, json.loads(written)
    for name, keys in HUB.items():
        if "text_config" in keys:  # a file of two models, which test_hybrid holds
            continue
        rope = {"rope_scaling": LLAMA3} if "Llama" in name else {}
        windows = dict.fromkeys({"sliding_window"} & set(keys), 7)
        yield name, SIZES | keys | {"rms_norm_eps": 1e-4, "rope_theta": 777.0} | rope | windows


FILES = dict(files())


def theirs(fields: dict[str, Any], tmp_path) -> dict[str, Any] | None:
    """Return what transformers' configuration class and its model's code take; None = an error."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    try:
        config = AutoConfig.from_pretrained(tmp_path)
    except Exception:  # noqa: BLE001  (any error for such a file)
        return None

    def get(name: str) -> Any:
        return getattr(config, name, None)

    gemma, heads = config.model_type.startswith("gemma"), config.num_attention_heads
    head_dim, kinds = get("head_dim") or config.hidden_size // heads, get("layer_types")
    layers = config.num_hidden_layers
    if config.model_type in ("mistral", "qwen3_moe"):
        windows = (config.sliding_window,) * layers
    else:
        windows = tuple(config.sliding_window if k == SLIDING else None for k in kinds or [FULL])
        windows = windows if kinds else windows * layers
    ropes = config.rope_parameters
    classes = "Classification" in fields["architectures"][0]
    names = config.id2label
    scalar = config.query_pre_attn_scalar if get("query_pre_attn_scalar") else head_dim
    options = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "windows": windows,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_scale": pytest.approx(scalar**-0.5),
        "activation": "gelu_tanh" if gemma else get("hidden_act"),
        "attention_softcap": get("attn_logit_softcapping"),
        "rope": rope(ropes.get(FULL, ropes)),
        "qkv_bias": bool(get("attention_bias")) or config.model_type == "qwen2",
        "o_bias": bool(get("attention_bias")),
        "mlp_bias": bool(get("mlp_bias")),
        "final_softcap": None if classes else get("final_logit_softcapping"),
        "tie_word_embeddings": bool(config.tie_word_embeddings) and not classes,
        "classes": tuple(names[i] for i in range(len(names))) if classes else None,
    }
    if config.model_type == "granite":
        options |= {
            "attention_scale": config.attention_multiplier,
            "embed_scale": config.embedding_multiplier,
            "stream_divisor": config.residual_multiplier,
            "rms_norm_eps": pytest.approx(config.rms_norm_eps / config.residual_multiplier**2),
            "logits_divisor": config.logits_scaling,
        }
    if config.model_type == "gemma3_text":
        options["window_rope"] = rope(ropes[SLIDING])
    thetas = [value.theta for value in options.values() if isinstance(value, Rope)]
    if config.model_type == "qwen3_moe":
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        options |= {
            "num_experts": config.num_experts,
            "top_k": config.num_experts_per_tok,
            "expert_size": config.moe_intermediate_size,
            "norm_top_k": bool(config.norm_topk_prob),
            "layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        }
    no_model = None in (*thetas, options.get("num_experts", 0))
    return None if no_model else options


def rope(fields: dict[str, Any]) -> Rope:
    match fields["rope_type"]:
        case "default":
            return Rope(fields["rope_theta"])
        case "linear":
            return Rope(fields["rope_theta"], fields["factor"])
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            own = [fields[name] for name in (*names, "original_max_position_embeddings")]
            return Rope(fields["rope_theta"], Llama3Rope(*own))
    raise ValueError(fields)


def ours(config: DecoderConfig, name: str) -> Any:
    mixture = config.mixture
    if mixture is not None and name in ("num_experts", "top_k", "norm_top_k", "layers"):
        return getattr(mixture, name)
    if mixture is not None and name == "expert_size":
        return mixture.intermediate_size
    return getattr(config, name)


def changes(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key, also those within the rotary embedding's, and the file without or as null."""
    for key in fields:
        if key != "architectures":
            yield key, {name: value for name, value in fields.items() if name != key}
            yield key, fields | {key: None}
    for key in ("rope_parameters", "rope_scaling"):
        for part, value in (fields.get(key) or {}).items():
            yield part, fields | {key: {k: v for k, v in fields[key].items() if k != part}}
            for inner in value if isinstance(value, dict) else ():
                less = {k: v for k, v in value.items() if k != inner}
                yield inner, fields | {key: fields[key] | {part: less}}


@pytest.mark.parametrize("name", FILES)
def test_an_absent_key_is_what_transformers_takes(name, tmp_path):
    wrong, compared = [], 0
    for key, fields in [("", FILES[name]), *changes(FILES[name])]:
        expected = theirs(fields, tmp_path)
        what = f"{key} {'null' if key in fields else 'absent'}"
        try:
            config = read_architecture(RawConfig(fields)).config
        except ConfigError as error:
            if not any(word in str(error) for word in (key, ALSO.get(key, key))) or not key:
                wrong.append((what, str(error)))
            continue
        if expected is None:
            continue
        compared += 1
        apart = {part: (ours(config, part), x) for part, x in expected.items()}
        wrong += [(what, part, *pair) for part, pair in apart.items() if pair[0] != pair[1]]
    assert not wrong
    assert compared > len(FILES[name]) / 2


def test_mistral_has_a_window_by_default(tmp_path):
    """Without `sliding_window` it is 4,096 tokens, which only longer prompts show."""
    make_model(tmp_path, "mistral", num_hidden_layers=1, max_position_embeddings=8192)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["sliding_window"]
    path.write_text(json.dumps(fields))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = [random_ids(np.random.default_rng(5), 4200)]
    with Scorer(str(tmp_path), dtype="float32") as scorer:
        got = scorer.score([], prompts, label_token_ids=[1, 2, 3], logprobs=True).logprobs
    assert np.abs(got - reference_logprobs(model, prompts)[:, [1, 2, 3]]).max() < 1e-3
