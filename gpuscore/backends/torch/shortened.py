"""A model of few layers, on which the largest batches are measured."""

from dataclasses import replace

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.decoder import DecoderWeights
from gpuscore_kernels.label_head import repeating_rows


def shortened(
    config: DecoderConfig, weights: DecoderWeights
) -> tuple[DecoderConfig, DecoderWeights]:
    """Return the same model with one layer of each kind and the last layer.

    Layers run one after the other, so a batch takes as much memory as with all layers, but much
    less time. The same holds for tiles of the label head, of which a CPU gets the first ones.
    """
    mixture = config.mixture
    kinds: dict[object, int] = {}
    for layer, window in enumerate(config.windows):
        kinds.setdefault((window, mixture is not None and mixture.layers[layer]), layer)
    chosen = sorted({*kinds.values(), config.num_layers - 1})
    short = replace(
        config,
        num_layers=len(chosen),
        windows=tuple(config.windows[layer] for layer in chosen),
        mixture=mixture
        and replace(mixture, layers=tuple(mixture.layers[layer] for layer in chosen)),
    )
    head = weights.lm_head
    if head.device.type == "cpu":
        head = head[: repeating_rows(head.shape[1])]
    layers = tuple(weights.layers[layer] for layer in chosen)
    return short, replace(weights, layers=layers, lm_head=head)
