"""The weights of a decoder, as the loader reads them. The names are Hugging Face's."""

from dataclasses import dataclass, replace

from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.delta_net.layer import DeltaWeights
from gpuscore.backends.torch.linear import LinearWeights
from gpuscore.backends.torch.mixture import MoEWeights
from gpuscore_kernels.label_head import repeating_rows


@dataclass(frozen=True, slots=True)
class MLPWeights:
    gate_up_proj: LinearWeights  # [2 I, E]
    down_proj: LinearWeights  # [E, I]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_layernorm: Tensor  # [E]
    # [(H + 2 Hkv) D, E]: q rows, then k, then v; with an output gate its H D rows come first. The
    # last layer has its queries in one part, keys and values in another. In a layer of linear
    # attention: `delta_net.layer.DELTA_PARTS`.
    qkv_proj: LinearWeights
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o_proj: LinearWeights  # [E, H D]
    post_self_attn_layernorm: Tensor | None  # [E], of attention's output (Gemma 2 and 3)
    post_attention_layernorm: Tensor  # [E], in front of the MLP
    mlp: MLPWeights | MoEWeights
    post_mlp_layernorm: Tensor | None  # [E], of the MLP's output (Gemma 2 and 3)
    linear_attn: DeltaWeights | None = None  # None = full attention


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embed_tokens: Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [E]
    # [V, E] (the embedding itself if tied), [classes, E], or with biases [classes, E + 8]: column E
    # has the biases, and hidden states get a column of ones for it.
    lm_head: Tensor
    head_inner: LinearWeights | None = None  # the first layer, if the head has two


def shortened(
    config: DecoderConfig, weights: DecoderWeights
) -> tuple[DecoderConfig, DecoderWeights]:
    """Return a model for checks and measurements: one layer of each kind, and the last layer.

    Layers run one after the other, so a batch takes as much memory as with all layers, but much
    less time. The label head also runs tile by tile, so on a CPU only its first tiles stay.
    """
    mixture = config.mixture
    net = config.delta_net
    kinds: dict[object, int] = {}
    for layer, window in enumerate(config.windows):
        experts = mixture is not None and mixture.layers[layer]
        kinds.setdefault((window, experts, config.is_linear(layer)), layer)
    chosen = sorted({*kinds.values(), config.num_layers - 1})
    short = replace(
        config,
        num_layers=len(chosen),
        windows=tuple(config.windows[layer] for layer in chosen),
        mixture=mixture
        and replace(mixture, layers=tuple(mixture.layers[layer] for layer in chosen)),
        delta_net=net and replace(net, layers=tuple(net.layers[layer] for layer in chosen)),
    )
    head = weights.lm_head
    if head.device.type == "cpu":
        head = head[: repeating_rows(head.shape[1])]
    layers = tuple(weights.layers[layer] for layer in chosen)
    return short, replace(weights, layers=layers, lm_head=head)
