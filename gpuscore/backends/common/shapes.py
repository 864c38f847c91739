"""Sizes of a model's parts, from its configuration alone."""

import math
from collections.abc import Iterator

from gpuscore.backends.common.architectures.names import layer_weights
from gpuscore.backends.common.hf_config import DecoderConfig, DeltaNet
from gpuscore.backends.common.quantization import EXPERTS, LINEAR, Precision

SCALE_BYTES = 8  # of a row of a quantised weight: a scale, and on a CPU a zero point beside it


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Expected shape of each part of a checkpoint; parts are named as in the weight tables."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "lm_head": (config.label_rows, hidden),
        "head_inner": (hidden, hidden),
        "final_norm": (hidden,),
        "input_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "mlp_norm": (hidden,),
        "post_mlp_norm": (hidden,),
        "q": ((2 if config.output_gate else 1) * q_size, hidden),  # heads, each with its gate
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    if config.delta_net is not None:
        shapes |= _delta_net_shapes(config.delta_net, hidden)
    if config.mixture is not None:
        expert = config.mixture.intermediate_size
        shapes |= {
            "router": (config.mixture.num_experts, hidden),
            "expert_gate": (expert, hidden),
            "expert_up": (expert, hidden),
            "expert_down": (hidden, expert),
        }
    biases = {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    return shapes | biases


def _delta_net_shapes(net: DeltaNet, hidden: int) -> dict[str, tuple[int, ...]]:
    values = net.num_value_heads * net.value_dim
    return {
        "delta_qkv": (net.convolved, hidden),
        "delta_z": (values, hidden),
        "delta_b": (net.num_value_heads, hidden),
        "delta_a": (net.num_value_heads, hidden),
        "delta_conv": (net.convolved, 1, net.kernel),
        "delta_log": (net.num_value_heads,),
        "delta_dt": (net.num_value_heads,),
        "delta_norm": (net.value_dim,),
        "delta_o": (hidden, values),
    }


def count_parameters(config: DecoderConfig) -> int:
    """Number of the model's parameters; a tied head counts once."""
    shapes = weight_shapes(config)
    in_layers = sum(math.prod(shapes[part]) * count for part, count in _in_layers(config))
    head = () if config.tie_word_embeddings else config.head_parts
    beside = ("embed", "final_norm", *head)
    return in_layers + sum(math.prod(shapes[part]) for part in beside)


def count_weight_bytes(config: DecoderConfig, itemsize: int, precision: Precision) -> int:
    """Bytes of the weights; in INT8, linear layers have a byte per number and row scales."""
    shapes = weight_shapes(config)
    total = count_parameters(config) * itemsize
    if precision != "int8":
        return total
    for part, count in _in_layers(config):
        if part in LINEAR | EXPERTS:
            rows, columns = shapes[part]
            total += count * (rows * columns * (1 - itemsize) + rows * SCALE_BYTES)
    return total


def _in_layers(config: DecoderConfig) -> Iterator[tuple[str, int]]:
    """Yield each part of each layer, and how many tensors it has."""
    experts = config.mixture.num_experts if config.mixture is not None else 0
    for layer in range(config.num_layers):
        for part, name in layer_weights(config, layer).items():
            yield part, experts if "{expert}" in name else 1


def bytes_per_token(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values over all layers."""
    return 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim * itemsize


def bytes_per_state(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of one state of all linear layers: a float32 matrix per head, and the convolution's
    last inputs in the model's dtype."""
    if (net := config.delta_net) is None:
        return 0
    matrices = 4 * net.num_value_heads * net.key_dim * net.value_dim
    return sum(net.layers) * (matrices + (net.kernel - 1) * net.convolved * itemsize)
