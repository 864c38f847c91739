"""The decoder that all supported architectures share.

Classes and attributes are named as in Hugging Face's `modeling_qwen3.py`, and for linear attention
as in `modeling_qwen3_5.py`. What differs: a batch is one row of T tokens (see `types.batch`); q, k
and v are one product, gate and up another; and the next norm adds a block's output to the residual
stream, because one kernel does both.

Sizes: T tokens, N scored rows, E hidden size, I intermediate size, H heads, Hkv KV heads, D head
size, V tokens of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.ropes import Rope
from gpuscore.backends.torch.attention.choice import AttentionPass
from gpuscore.backends.torch.delta_net.layer import DeltaNetPass
from gpuscore.backends.torch.kv_pool import KeptRows
from gpuscore.backends.torch.layers import inverse_frequencies, norm_and_rotate, rotary_tables
from gpuscore.backends.torch.linear import DenseLinear, Linear, LinearParts
from gpuscore.backends.torch.mixture import MoE
from gpuscore.backends.torch.operators import Operators
from gpuscore.backends.torch.weights import DecoderWeights, LayerWeights, MLPWeights
from gpuscore_kernels.qk_norm_rope_store import qk_norm_rope_store
from gpuscore_kernels.reference import QkvHeads, add_and_norm, gated, rms_norm


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the layers read of a batch beside its hidden states."""

    attention: AttentionPass
    kept: KeptRows
    linear_attn: DeltaNetPass | None = None  # only of models with layers of linear attention
    # How many rows, and scored rows, are no padding, int32 [1]; None = all. Mixtures of experts
    # compute nothing for padding.
    num_tokens: Tensor | None = None
    num_scored: Tensor | None = None


class RMSNorm:
    def __init__(self, weight: Tensor, config: DecoderConfig, operators: Operators) -> None:
        self.weight = weight
        self.eps = config.rms_norm_eps
        self.one_plus = config.one_plus_norms  # Gemma multiplies by 1 + weight
        self._rms_norm = operators.by_rows(operators.compiler(rms_norm))
        self._add_and_norm = operators.by_rows(operators.compiler(add_and_norm), 2)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self._rms_norm(hidden_states, self.weight, self.eps, self.one_plus)

    def after_adding(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + hidden_states, and this sum: the next residual."""
        if residual is None:  # in front of all layers
            return self(hidden_states), hidden_states
        residual, hidden_states = self._add_and_norm(
            residual, hidden_states, self.weight, self.eps, self.one_plus
        )
        return hidden_states, residual


class RotaryEmbedding:
    def __init__(
        self, rope: Rope, config: DecoderConfig, weights: DecoderWeights, operators: Operators
    ) -> None:
        rotated = config.rotary_dim or config.head_dim
        device = weights.embed_tokens.device
        self.inv_freq = inverse_frequencies(rope, rotated, config.head_dim, device)
        self._rotary_tables = operators.by_rows(rotary_tables)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 [T, D / 2]."""
        return self._rotary_tables(positions, frequencies=self.inv_freq)


class Attention:
    def __init__(
        self, layer_idx: int, config: DecoderConfig, weights: LayerWeights, operators: Operators
    ) -> None:
        by_rows = operators.by_rows
        self.layer_idx = layer_idx
        self.gate_size = config.num_heads * config.head_dim if config.output_gate else 0
        if layer_idx < config.num_layers - 1:
            self.qkv_proj = by_rows(Linear(weights.qkv_proj, operators.products))
        else:  # see `of_scored_rows`
            assert isinstance(weights.qkv_proj, LinearParts)  # noqa: S101  (the loader has divided it)
            self.q_proj, self.kv_proj = (
                by_rows(Linear(part, operators.products)) for part in weights.qkv_proj.parts
            )
        self.o_proj = by_rows(Linear(weights.o_proj, operators.products))
        self.heads = QkvHeads(
            queries=config.num_heads,
            keys=config.num_kv_heads,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=config.rms_norm_eps,
            one_plus=config.one_plus_norms,
        )
        self.q_heads = replace(self.heads, keys=0)
        self.kv_heads = replace(self.heads, queries=0)
        fused = operators.impl == "triton"
        # With tiles it cannot store, because padding has no slots.
        self._kernel_stores = fused and not operators.in_tiles
        self._norm_and_rotate: Callable[..., tuple[Tensor, Tensor, Tensor]] = by_rows(
            qk_norm_rope_store if fused else operators.compiler(norm_and_rotate), 3
        )
        self._apply_gate = by_rows(apply_gate, 2)

    def __call__(
        self,
        position_embeddings: tuple[Tensor, Tensor],
        hidden_states: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        gate, qkv = self._split_gate(self.qkv_proj(hidden_states))
        q, k, v = self._norm_rotate_store(qkv, position_embeddings, self.heads, context.kept)
        return self._attend(q, k, v, gate, context)

    def of_scored_rows(
        self,
        position_embeddings: tuple[Tensor, Tensor],
        hidden_states: Tensor,
        residual: Tensor,
        score_rows: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and the residual of the scored rows.

        The last layer computes keys and values of every row, because later batches may read them,
        and everything else of the scored rows only.
        """
        kv = self.kv_proj(hidden_states)
        _, k, v = self._norm_rotate_store(kv, position_embeddings, self.kv_heads, context.kept)
        residual, hidden_states, cos, sin = (
            rows.index_select(0, score_rows)
            for rows in (residual, hidden_states, *position_embeddings)
        )
        gate, q = self._split_gate(self.q_proj(hidden_states))
        q, _, _ = self._norm_and_rotate(q, cos, sin, self.q_heads)
        return self._attend(q, k, v, gate, context), residual

    def _split_gate(self, qkv: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the output gate [T, H D], if the model has one, and the rest of the product."""
        if not self.gate_size:
            return None, qkv
        return qkv[:, : self.gate_size], qkv[:, self.gate_size :]

    def _norm_rotate_store(
        self,
        qkv: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        heads: QkvHeads,
        kept: KeptRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split q [T, H, D], k and v [T, Hkv, D]; norm and rotate q and k; write k and v to pages.

        It writes only the rows that later batches may read.
        """
        cos, sin = position_embeddings
        if self._kernel_stores:
            pages = kept.pages(self.layer_idx)
            return qk_norm_rope_store(qkv, cos, sin, heads, pages=pages)
        q, k, v = self._norm_and_rotate(qkv, cos, sin, heads)
        kept.write(self.layer_idx, k, v)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, context: ForwardContext
    ) -> Tensor:
        attn_output = context.attention.run(self.layer_idx, q, k, v).flatten(1)
        if gate is not None:
            attn_output = self._apply_gate(attn_output, gate)
        return self.o_proj(attn_output)


def apply_gate(attn_output: Tensor, gate: Tensor) -> Tensor:
    """Return attn_output * sigmoid(gate), in place; float32 inside, rounded once."""
    return attn_output.mul_(gate.float().sigmoid())


class LinearAttention:
    """The gated delta net of Qwen3.5, in the place of `Attention`."""

    def __init__(self, layer_idx: int, weights: LayerWeights, operators: Operators) -> None:
        assert weights.linear_attn is not None  # noqa: S101  (the caller has checked)
        self.layer_idx = layer_idx
        self.weights = weights.linear_attn
        self.in_proj = operators.by_rows(Linear(weights.qkv_proj, operators.products))
        self.out_proj = operators.by_rows(Linear(weights.o_proj, operators.products))

    def __call__(
        self,
        position_embeddings: tuple[Tensor, Tensor],
        hidden_states: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """Return the outputs; states know the order of tokens without position embeddings."""
        assert context.linear_attn is not None  # noqa: S101  (the launcher has prepared it)
        projected = self.in_proj(hidden_states)
        return self.out_proj(context.linear_attn.run(self.layer_idx, self.weights, projected))

    def of_scored_rows(
        self,
        position_embeddings: tuple[Tensor, Tensor],
        hidden_states: Tensor,
        residual: Tensor,
        score_rows: Tensor,
        context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and the residual of the scored rows; a state needs every row."""
        hidden_states = self(position_embeddings, hidden_states, context)
        return hidden_states.index_select(0, score_rows), residual.index_select(0, score_rows)


class MLP:
    def __init__(self, config: DecoderConfig, weights: MLPWeights, operators: Operators) -> None:
        self.activation = config.activation
        self.gate_up_proj = Linear(weights.gate_up_proj, operators.products)
        self.down_proj = Linear(weights.down_proj, operators.products)
        self._gated = operators.compiler(gated)
        self._operators = operators

    def __call__(self, hidden_states: Tensor, num_rows: Tensor | None = None) -> Tensor:
        """Return the outputs [T, E], of padding too."""
        return self.down_proj(self._gate_and_up(hidden_states))

    def _gate_and_up(self, hidden_states: Tensor) -> Tensor:
        """Return act(gate) * up, [T, I]."""
        fused = self._operators.gated_product
        if fused is not None and len(hidden_states) >= self._operators.gated_from:
            weights = self.gate_up_proj.weights
            assert isinstance(weights, DenseLinear)  # noqa: S101  (the plan has checked it)
            return fused(hidden_states, weights.weight)
        return self._gated(self.gate_up_proj(hidden_states), self.activation)


class DecoderLayer:
    def __init__(
        self, layer_idx: int, config: DecoderConfig, weights: LayerWeights, operators: Operators
    ) -> None:
        def norm(weight: Tensor | None) -> RMSNorm | None:
            return None if weight is None else RMSNorm(weight, config, operators)

        self.rope = config.rope_of(layer_idx)
        self.input_layernorm = RMSNorm(weights.input_layernorm, config, operators)
        self.self_attn = (
            Attention(layer_idx, config, weights, operators)
            if weights.linear_attn is None
            else LinearAttention(layer_idx, weights, operators)
        )
        self.post_self_attn_layernorm = norm(weights.post_self_attn_layernorm)
        self.post_attention_layernorm = RMSNorm(weights.post_attention_layernorm, config, operators)
        self.mlp = operators.by_rows(
            MLP(config, weights.mlp, operators)
            if isinstance(weights.mlp, MLPWeights)
            else MoE(config.activation, weights.mlp, operators)
        )
        self.post_mlp_layernorm = norm(weights.post_mlp_layernorm)

    def __call__(
        self,
        position_embeddings: tuple[Tensor, Tensor],
        hidden_states: Tensor,
        residual: Tensor,
        context: ForwardContext,
        score_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the MLP's output, and the residual stream, to which the next norm adds it.

        The decoder has called `input_layernorm` on `hidden_states`, because a call in here could
        not free its input. With `score_rows`, return these rows only.
        """
        if score_rows is None:
            hidden_states = self.self_attn(position_embeddings, hidden_states, context)
            num_rows = context.num_tokens
        else:
            hidden_states, residual = self.self_attn.of_scored_rows(
                position_embeddings, hidden_states, residual, score_rows, context
            )
            num_rows = context.num_scored
        if self.post_self_attn_layernorm is not None:
            hidden_states = self.post_self_attn_layernorm(hidden_states)
        hidden_states, residual = self.post_attention_layernorm.after_adding(
            hidden_states, residual
        )
        hidden_states = self.mlp(hidden_states, num_rows)
        if self.post_mlp_layernorm is not None:
            hidden_states = self.post_mlp_layernorm(hidden_states)
        return hidden_states, residual


class Decoder:
    """A model without its head: from token ids to the hidden states of the scored rows."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, operators: Operators | None = None
    ) -> None:
        operators = operators or Operators()
        self.config = config
        self.weights = weights
        self.layers = [
            DecoderLayer(layer_idx, config, layer, operators)
            for layer_idx, layer in enumerate(weights.layers)
        ]
        self.norm = RMSNorm(weights.norm, config, operators)
        self.head_inner: Linear | None = None
        if weights.head_inner is not None:
            self.head_inner = operators.by_rows(Linear(weights.head_inner, operators.products))
        self.rotary_emb = {
            layer.rope: RotaryEmbedding(layer.rope, config, weights, operators)
            for layer in self.layers
        }
        self.layers_done = 0  # in all passes so far, without the last layer of each
        self._embedding = operators.embedding
        # Rounded to the model's dtype first, as the models were trained.
        self._embed_scale = weights.embed_tokens.new_tensor(config.embed_scale)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, score_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Return hidden states [N, E] of `score_rows`, as the label head takes them."""
        hidden_states = self.embed_tokens(token_ids)
        residual: Tensor | None = None
        position_embeddings = {rope: emb(positions) for rope, emb in self.rotary_emb.items()}
        for layer in self.layers[:-1]:
            hidden_states, residual = layer.input_layernorm.after_adding(hidden_states, residual)
            hidden_states, residual = layer(
                position_embeddings[layer.rope], hidden_states, residual, context
            )
            self.layers_done += 1
        last = self.layers[-1]  # keeps the scored rows only
        hidden_states, residual = last.input_layernorm.after_adding(hidden_states, residual)
        hidden_states, residual = last(
            position_embeddings[last.rope], hidden_states, residual, context, score_rows
        )
        hidden_states, _ = self.norm.after_adding(hidden_states, residual)
        if self.head_inner is not None:
            hidden_states = self.head_inner(hidden_states).relu_()
        width = self.weights.lm_head.shape[1] - self.config.hidden_size
        return functional.pad(hidden_states, (0, width), value=1.0) if width else hidden_states

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the residual stream [T, E] in front of all layers, float32."""
        x = self._embedding(token_ids, self.weights.embed_tokens)
        x = (x if self.config.embed_scale == 1 else x * self._embed_scale).float()
        return x if self.config.stream_divisor == 1 else x / self.config.stream_divisor
