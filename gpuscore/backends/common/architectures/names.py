"""Names of the tensors in Llama-like checkpoints.

Every table maps a part, which is our name of a tensor, to its name in the checkpoint.
"""

from gpuscore.backends.common.hf_config import DecoderConfig

MODEL_WEIGHTS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

LAYER_WEIGHTS = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

QK_NORM = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}

QKV_BIAS = {
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}

O_BIAS = {"o_bias": "self_attn.o_proj.bias"}

MLP_BIAS = {
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


# A gated delta net (linear attention), which replaces the attention of a layer.
DELTA_NET = {
    "delta_qkv": "linear_attn.in_proj_qkv.weight",
    "delta_z": "linear_attn.in_proj_z.weight",
    "delta_b": "linear_attn.in_proj_b.weight",
    "delta_a": "linear_attn.in_proj_a.weight",
    "delta_conv": "linear_attn.conv1d.weight",
    "delta_log": "linear_attn.A_log",
    "delta_dt": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
    "delta_o": "linear_attn.out_proj.weight",
}

# A mixture of experts, which replaces the MLP of a layer.
MIXTURE = {
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
}

# Gemma 2 and 3 also normalise the outputs of attention and MLP. In other architectures the name
# post_attention_layernorm means the norm before the MLP.
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def layer_weights(config: DecoderConfig, layer: int) -> dict[str, str]:
    """Return the names of a layer's tensors by part; `{expert}` stands for each expert's number."""
    names = dict(LAYER_WEIGHTS)
    for present, more in (
        (config.qk_norm, QK_NORM),
        (config.qkv_bias, QKV_BIAS),
        (config.o_bias, O_BIAS),
        (config.mlp_bias, MLP_BIAS),
        (config.post_norms, POST_NORMS),
    ):
        names |= more if present else {}
    if config.is_linear(layer):
        names = {part: name for part, name in names.items() if "self_attn." not in name} | DELTA_NET
    if config.mixture is not None and config.mixture.layers[layer]:
        dense = ("gate", "up", "down")
        names = {part: name for part, name in names.items() if part not in dense} | MIXTURE
    return names
