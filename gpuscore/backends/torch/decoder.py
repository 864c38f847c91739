"""The decoder that all supported architectures share: norms, rotary attention, a gated MLP."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.ropes import Rope
from gpuscore.backends.torch.compiler import Compiler, eagerly
from gpuscore.backends.torch.delta_net.layer import DeltaWeights, Recur
from gpuscore.backends.torch.kv_pool import KeptRows
from gpuscore.backends.torch.layers import (
    ByRows,
    add_and_norm,
    all_at_once,
    gated,
    inverse_frequencies,
    norm_and_rotate,
    rms_norm,
    rotary_tables,
)
from gpuscore.backends.torch.linear import DenseLinear, Linear, LinearParts, Products
from gpuscore.backends.torch.mixture import MixtureMlp, MixtureWeights
from gpuscore_kernels import Implementation
from gpuscore_kernels.hopper import FEWEST_ROWS
from gpuscore_kernels.label_head import repeating_rows
from gpuscore_kernels.qk_norm_rope_store import Pages, qk_norm_rope_store
from gpuscore_kernels.reference import QkvHeads

# attend(layer, q [M, H, D], k [T, Hkv, D], v [T, Hkv, D]) -> [M, H, D]. M is T, except in the
# last layer, where q holds the scored rows only.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# How many of a batch's rows, and of its scored rows, are no padding, int32 [1] each; None = all.
Filled: TypeAlias = tuple[Tensor | None, Tensor | None]
# The residual stream [T, E], and what is still to be added to it; None in front of all layers.
Stream: TypeAlias = tuple[Tensor, Tensor | None]
Rotary: TypeAlias = Mapping[Rope, tuple[Tensor, ...]]  # cos and sin of all rows, [T, D / 2]
# (token ids [T], table [V, E]) -> rows of the table [T, E].
Lookup: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Needs of the layers of one forward pass beside its rows."""

    attend: Attend
    kept: KeptRows
    filled: Filled = (None, None)  # mixtures of experts compute nothing for padding
    recur: Recur | None = None  # only of models with linear layers


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate_up: Linear  # [2 I, E]
    down: Linear  # [E, I]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [E]
    # [(H + 2 Hkv) D, E]: q rows, then k, then v; with an output gate its H D rows come first. The
    # last layer has its queries in one part, keys and values in another. In a linear layer:
    # `delta_net.layer.DELTA_PARTS`.
    qkv: Linear
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Linear  # [E, H D]
    post_attention_norm: Tensor | None  # [E]
    mlp_norm: Tensor  # [E]
    mlp: MlpWeights | MixtureWeights
    post_mlp_norm: Tensor | None  # [E]
    delta: DeltaWeights | None = None  # of a linear layer, which has no attention


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embed: Tensor  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [E]
    # [V, E]; the embedding itself where they are tied, or [classes, E] or [classes, E + 8] with a
    # bias in column E, for which rows end with ones.
    lm_head: Tensor
    head_inner: Linear | None = None  # of a head of two layers, the first


class Decoder:
    """Weights and configuration of one model; `forward` keeps no state.

    Args:
        config, weights: of the model.
        compiler: makes element-wise functions fast.
        by_rows: applies a stage to all rows at once, or tile by tile.
        own: implementation of the parts that have a kernel of ours and do not compute row by row:
            everything between the QKV product and attention.
        lookup: reads embeddings.
        gated_product: computes silu(gate) * up from rows and plain weights, `gated_from` rows or
            more of them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        compiler: Compiler = eagerly,
        *,
        by_rows: ByRows = all_at_once,
        own: Implementation = "reference",
        lookup: Lookup = functional.embedding,
        gated_product: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.config = config
        self._lookup, self._gated_product = lookup, gated_product
        self.gated_from = FEWEST_ROWS
        self._by_rows = by_rows
        self._own: Implementation = own
        # The kernel stores keys and values itself, but not tile by tile: padding has no slots.
        self._stores = own == "triton" and by_rows is all_at_once
        self._gate_size = config.num_heads * config.head_dim if config.output_gate else 0
        self._of_norms = config.rms_norm_eps, config.one_plus_norms
        self.weights = weights
        self.layers_done = 0  # by all passes so far
        # Rounded to the model's dtype first, as the models were trained.
        self._embed_scale = weights.embed.new_tensor(config.embed_scale)
        self._rms_norm = compiler(rms_norm)
        self._add_and_norm = compiler(add_and_norm)
        self._norm_and_rotate = compiler(norm_and_rotate)
        self._gated = compiler(gated)
        self._product = Products(compiler)
        activate = partial(self._gated, activation=config.activation)
        self._mixture = MixtureMlp(activate, self._product, by_rows is not all_at_once)
        self.ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
        self.frequencies = {
            rope: inverse_frequencies(
                rope, config.rotary_dim or config.head_dim, config.head_dim, weights.embed.device
            )
            for rope in self.ropes
        }

    def forward(
        self, token_ids: Tensor, positions: Tensor, score_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Return hidden states [N, E] of `score_rows`, as the label head takes them.

        The last layer computes keys and values of every row, because later batches may read
        them, but queries, output projection and MLP of the scored rows only; a linear layer
        computes all of every row.
        """
        rotary, last = self._rotary(positions), self.weights.layers[-1]
        streams: list[Stream] = [(self.embed(token_ids), None)]
        whole = len(self.weights.layers) - (last.delta is None)  # layers that compute all rows
        for index in range(whole):
            stream = self._one_layer(index, streams.pop(), rotary, context)
            streams.append(stream)
            self.layers_done += 1
            del stream  # whoever holds it holds its memory through the next layer
        x, delta = streams.pop()
        if last.delta is not None:
            assert delta is not None  # noqa: S101  (an MLP has computed it)
            return self.final_norm(*(rows.index_select(0, score_rows) for rows in (x, delta)))
        angles = rotary[self.ropes[-1]]
        keys = partial(self._keys, last, self._pages(context.kept, whole))
        x, normed, k, v = self._by_rows(keys, x, delta, *angles)
        self._store(context.kept, whole, k, v)
        x, *chosen = (rows.index_select(0, score_rows) for rows in (x, normed, *angles))
        q, *gate = self._by_rows(partial(self._queries, last), *chosen)
        attended = context.attend(whole, q, k, v).flatten(1)
        after = partial(self._after, last, context.filled[1])
        return self.final_norm(*self._by_rows(after, x, attended, *gate))

    def _one_layer(
        self, index: int, stream: Stream, rotary: Rotary, context: ForwardContext
    ) -> Stream:
        """Return the stream after a layer, for all rows."""
        layer, angles = self.weights.layers[index], rotary[self.ropes[index]]
        x, delta = stream
        del stream  # so that the memory of x is free when the first norm has read it
        after = partial(self._after, layer, context.filled[0])
        if layer.delta is not None:
            assert context.recur is not None  # noqa: S101  (the caller has prepared it)
            x, product = self._by_rows(partial(self._projected, layer), x, delta)
            mixed = context.recur(index, layer.delta, product)
            x, delta = self._by_rows(after, x, mixed)
            return x, delta
        before = partial(self._before, layer, self._pages(context.kept, index))
        x, q, k, v, *gate = self._by_rows(before, x, delta, *angles)
        self._store(context.kept, index, k, v)
        attended = context.attend(index, q, k, v).flatten(1)
        x, delta = self._by_rows(after, x, attended, *gate)
        return x, delta

    def _rotary(self, positions: Tensor) -> Rotary:
        """Return the tables of each kind of rotary embedding that layers use."""
        return {
            rope: self._by_rows(partial(rotary_tables, frequencies=frequencies), positions)
            for rope, frequencies in self.frequencies.items()
        }

    def _pages(self, kept: KeptRows, layer: int) -> Pages | None:
        return kept.pages(layer) if self._stores else None

    def _store(self, kept: KeptRows, layer: int, k: Tensor, v: Tensor) -> None:
        if not self._stores:
            kept.write(layer, k, v)

    def _before(
        self,
        layer: LayerWeights,
        pages: Pages | None,
        x: Tensor,
        delta: Tensor | None,
        *angles: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return x + delta, and q [T, H, D], k and v [T, Hkv, D] of all rows; q and k rotated.

        The gate [T, H D] of models that have one is the last.
        """
        x, normed = self._residual(x, delta, layer.input_norm)
        heads = self._heads(layer, self.config.num_heads, self.config.num_kv_heads)
        return x, *self._turned(self._product(layer.qkv, normed), angles, heads, pages)

    def _keys(
        self,
        layer: LayerWeights,
        pages: Pages | None,
        x: Tensor,
        delta: Tensor | None,
        *angles: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x + delta, its norm, and k and v of all rows."""
        x, normed = self._residual(x, delta, layer.input_norm)
        product = self._product(_parts(layer.qkv)[1], normed)
        heads = self._heads(layer, 0, self.config.num_kv_heads)
        _, k, v = self._turned(product, angles, heads, pages)
        return x, normed, k, v

    def _queries(self, layer: LayerWeights, normed: Tensor, *angles: Tensor) -> tuple[Tensor, ...]:
        product = self._product(_parts(layer.qkv)[0], normed)
        heads = self._heads(layer, self.config.num_heads, 0)
        q, _, _, *gate = self._turned(product, angles, heads)
        return q, *gate

    def _projected(
        self, layer: LayerWeights, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta, and the projections of a linear layer."""
        x, normed = self._residual(x, delta, layer.input_norm)
        return x, self._product(layer.qkv, normed)

    def _heads(self, layer: LayerWeights, queries: int, keys: int) -> QkvHeads:
        return QkvHeads(queries, keys, layer.q_norm, layer.k_norm, *self._of_norms)

    def _turned(
        self,
        product: Tensor,
        angles: tuple[Tensor, ...],
        heads: QkvHeads,
        pages: Pages | None = None,
    ) -> tuple[Tensor, ...]:
        """Split a product into q [T, H, D], k and v [T, Hkv, D]; q and k are normed and rotated.

        The gate of queries [T, H D] comes last, in models that have one.
        """
        gate: tuple[Tensor, ...] = ()
        if heads.queries and self._gate_size:
            gate, product = (product[:, : self._gate_size],), product[:, self._gate_size :]
        cos, sin = angles
        if self._own == "triton":
            sides = qk_norm_rope_store(product, cos, sin, heads, pages=pages)
        else:
            sides = self._norm_and_rotate(product, cos, sin, heads)
        return *sides, *gate

    def _after(
        self,
        layer: LayerWeights,
        filled: Tensor | None,
        x: Tensor,
        attended: Tensor,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and the MLP's output to be added to it."""
        if gate is not None:
            attended = attended.mul_(gate.float().sigmoid())  # in float32, rounded once
        delta = self._product(layer.o, attended)
        delta = self._post_norm(delta, layer.post_attention_norm)
        x, normed = self._residual(x, delta, layer.mlp_norm)
        if isinstance(layer.mlp, MlpWeights):
            added = self._mlp(layer.mlp, normed)
        else:
            added = self._mixture(layer.mlp, normed, filled)
        return x, self._post_norm(added, layer.post_mlp_norm)

    def final_norm(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Return the norm of x + delta, [N, E], after the inner layer of a head that has one."""
        width = self.weights.lm_head.shape[1] - self.config.hidden_size

        def of_rows(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
            x, normed = self._residual(x, delta, self.weights.final_norm)
            if self.weights.head_inner is not None:
                normed = self._product(self.weights.head_inner, normed).relu_()
            return x, functional.pad(normed, (0, width), value=1.0) if width else normed

        return self._by_rows(of_rows, x, delta)[1]

    def _residual(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + delta, and its norm."""
        if delta is None:
            return x, self._rms_norm(x, weight, *self._of_norms)
        added: tuple[Tensor, Tensor] = self._add_and_norm(x, delta, weight, *self._of_norms)
        return added

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the stream [T, E] in front of all layers, float32."""
        x = self._lookup(token_ids, self.weights.embed)
        x = (x if self.config.embed_scale == 1 else x * self._embed_scale).float()
        return x if self.config.stream_divisor == 1 else x / self.config.stream_divisor

    def _post_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        normed: Tensor = x if weight is None else self._rms_norm(x, weight, *self._of_norms)
        return normed

    def _mlp(self, mlp: MlpWeights, x: Tensor) -> Tensor:
        if self._gated_product is not None and len(x) >= self.gated_from:
            assert isinstance(mlp.gate_up, DenseLinear)  # noqa: S101  (the plan has checked it)
            inner = self._gated_product(x, mlp.gate_up.weight)
        else:
            inner = self._gated(self._product(mlp.gate_up, x), self.config.activation)
        return self._product(mlp.down, inner)


def _parts(qkv: Linear) -> tuple[Linear, ...]:
    assert isinstance(qkv, LinearParts)  # noqa: S101  (the loader's promise for a last layer)
    return qkv.parts


def shortened(
    config: DecoderConfig, weights: DecoderWeights
) -> tuple[DecoderConfig, DecoderWeights]:
    """Return the same model with one layer of each kind, and the last layer.

    Layers run one after the other, so a batch takes as much memory as with all layers, but much
    less time. The same holds for tiles of the label head, so a CPU gets the first tiles only.
    """
    mixture, net = config.mixture, config.delta_net
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
