"""Weight names in checkpoints of the Llama lineage: our part -> name in the checkpoint."""

from gpuscore.backends.torch.hf_config import DecoderConfig

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


def layer_weights(config: DecoderConfig) -> dict[str, str]:
    """The parts that a model with this configuration has in each layer."""
    names = dict(LAYER_WEIGHTS)
    for present, more in (
        (config.qk_norm, QK_NORM),
        (config.qkv_bias, QKV_BIAS),
        (config.o_bias, O_BIAS),
        (config.mlp_bias, MLP_BIAS),
    ):
        names |= more if present else {}
    return names
