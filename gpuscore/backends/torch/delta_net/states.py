"""The slots of states: of each linear layer a matrix per head and the convolution's last inputs."""

import torch
from torch import Tensor

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.kv_pool import zeros


class StatePool:
    """States that later batches need, by slot; they start as zeros.

    `matrices` [slots, Hk, Dk, R Dv] in float32 and `tails` [slots, kernel - 1, columns] in the
    model's dtype, by layer: Hk key heads, each with R value heads.
    """

    def __init__(
        self, config: DecoderConfig, num_states: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.matrices: dict[int, Tensor] = {}
        self.tails: dict[int, Tensor] = {}
        if (net := config.delta_net) is None:
            return
        values = net.num_value_heads // net.num_key_heads * net.value_dim
        matrix = (num_states, net.num_key_heads, net.key_dim, values)
        tail = (num_states, net.kernel - 1, net.convolved)
        for layer in range(config.num_layers):
            if net.layers[layer]:
                self.matrices[layer] = zeros(matrix, torch.float32, device)
                self.tails[layer] = zeros(tail, dtype, device)
