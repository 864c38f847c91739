"""Linear layers: a causal convolution, the gated delta rule in chunks, a gated norm.

The rule is that of `gpuscore_kernels.delta_net`. A program goes through waves of chunks (`waves`),
each of a fixed size: rows after a chunk's last one are zeros that change no state. All is float32
inside.

Shapes: n chunks of L rows, Hk key heads, R value heads of each, Dk and Dv their sizes, C convolved
columns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gpuscore.backends.common.hf_config import DecoderConfig, DeltaNet
from gpuscore.backends.jax.attention import States, as_type
from gpuscore.backends.jax.layout import StateSizes, StateTables
from gpuscore.backends.jax.products import (
    Quantized,
    chosen,
    contract,
    linear,
    one_of,
    part,
    put,
    rows_of,
)

EPS = 1e-6  # in the norm of queries and keys


class RuleWeights(NamedTuple):
    """The weights of a linear layer beside its projections, float32."""

    conv: Array  # [kernel, C]
    decay: Array  # [R Hk], negative: log of the decay for a step of 1
    bias: Array  # [R Hk], of the step
    norm: Array  # [Dv]


class LinearBuffers(NamedTuple):
    """Memory that all linear layers of a batch share."""

    # Projections of the batch's rows, zeros for a chunk's length, the inputs before each prefix
    # that has a state, and a row of zeros.
    mixed: Array  # [T + L + slots (kernel - 1) + 1, C + R Hk (Dv + 2), perhaps padded]
    out: Array  # [T + L, R Hk Dv]
    # Float32 [1 + ends + slots, Hk, Dk, R Dv]: zeros, ends of chunks, states that are read.
    held: Array


class WaveInputs(NamedTuple):
    """Chunks that are computed at once."""

    first: Array  # number of its first chunk
    num_chunks: Array  # the rest of n are empty
    starts: Array  # [n] first rows
    lens: Array  # [n]
    targets: Array  # [n] places of the ends that are held
    inputs: Array  # [n, kernel - 1 + L, C] of the convolution
    rows: Array  # [n, L, ...] the projections that are not convolved
    state: Array  # [n, Hk, Dk, R Dv] that the chunks begin with


class Computed(NamedTuple):
    """Chunks of a wave, computed but for their end states."""

    out: Array  # [n, L, R Hk Dv]
    k: Array  # [n, Hk, L, Dk]
    written: Array  # [n, Hk, R, L, Dv] what each row adds to the state
    log: Array  # [n, Hk, R, L] decay since the chunk's start


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Linear attention of one batch."""

    config: DecoderConfig
    net: DeltaNet
    sizes: StateSizes
    tables: StateTables

    def buffers(self, tokens: int, dtype: jnp.dtype, lanes: int = 1) -> LinearBuffers:
        """Return zeros; on a device that stores arrays in tiles of `lanes` columns, whole tiles."""
        net, sizes = self.net, self.sizes
        values, rows = net.num_value_heads * net.value_dim, tokens + sizes.rows
        kept = sizes.slots * (net.kernel - 1) + 1
        columns = -(-(net.convolved + values + 2 * net.num_value_heads) // lanes) * lanes
        held = (1 + sizes.ends + sizes.slots, *matrix_shape(net))
        return LinearBuffers(
            jnp.zeros((rows + kept, columns), dtype),
            jnp.zeros((rows, values), dtype),
            jnp.zeros(held, jnp.float32),
        )

    def projected(self, x: Array, weight: Array | Quantized, columns: int) -> Array:
        """Return the projections of x [M, E], with zeros up to that many columns."""
        wide = self.net.convolved + self.net.num_value_heads * self.net.value_dim
        # Apart from the others, whose columns fill tiles: else a TPU would store the product the
        # other way around, and copy the buffer in every layer.
        rest = linear(x, rows_of(weight, wide))
        padding = (0, 0), (0, columns - wide - rest.shape[1])
        both = linear(x, rows_of(weight, 0, wide)), jnp.pad(rest, padding)
        return jnp.concatenate(both, axis=1)

    def run(
        self, layer: Array, weights: RuleWeights, buffers: LinearBuffers, states: States
    ) -> tuple[LinearBuffers, States]:
        """Compute the outputs of a layer, whose projections are in the buffers, and keep states."""
        with jax.named_scope("delta_rule"):
            buffers = self._read(layer, buffers, states)
            mixed = buffers.mixed

            def wave(
                index: Array, done: tuple[Array, Array, States]
            ) -> tuple[Array, Array, States]:
                return self._wave(index, layer, weights, mixed, *done)

            done = (buffers.out, buffers.held, states)
            out, held, states = lax.fori_loop(0, self.tables.waves[0], wave, done)
            return LinearBuffers(mixed, out, held), states

    def _read(self, layer: Array, buffers: LinearBuffers, states: States) -> LinearBuffers:
        """Copy the states after prefixes, because a chunk may overwrite the slot that it read."""
        rows, first = self.net.kernel - 1, len(buffers.out)

        def copy_state(index: Array, both: tuple[Array, Array]) -> tuple[Array, Array]:
            mixed, held = both
            place = layer * self.sizes.slots + one_of(self.tables.read_slots, index)
            matrix, tail = (part(side, place, 1) for side in states)
            tail = as_type(tail, mixed.dtype).reshape(rows, -1)
            mixed = put(mixed, tail, first + index * rows)
            return mixed, put(held, matrix, 1 + self.sizes.ends + index)

        both = buffers.mixed, buffers.held
        mixed, held = lax.fori_loop(0, self.tables.reads[0], copy_state, both)
        return LinearBuffers(mixed, buffers.out, held)

    def _wave(
        self,
        index: Array,
        layer: Array,
        weights: RuleWeights,
        mixed: Array,
        out: Array,
        held: Array,
        states: States,
    ) -> tuple[Array, Array, States]:
        wave, size = self._begun(index, mixed, held), self.sizes.rows
        done = computed(self.net, weights, self.config.rms_norm_eps, wave)

        def put_rows(chunk: Array, out: Array) -> Array:
            start, inside = one_of(wave.starts, chunk), jnp.arange(size) < one_of(wave.lens, chunk)
            new, old = _one(done.out, chunk).astype(out.dtype), part(out, start, size)
            return put(out, jnp.where(inside[:, None], new, old), start)

        def put_end(chunk: Array, held: Array) -> Array:
            chunk_done, state = jax.tree.map(lambda x: _one(x, chunk), (done, wave.state))
            return put(held, end_state(chunk_done, state)[None], one_of(wave.targets, chunk))

        def keep(entry: Array, states: States) -> States:
            chunk = one_of(self.tables.kept_chunks, entry) - wave.first
            place = layer * self.sizes.slots + one_of(self.tables.kept_slots, entry)
            matrix = part(held, one_of(wave.targets, chunk), 1)
            tail = part(_one(wave.inputs, chunk), one_of(wave.lens, chunk), self.net.kernel - 1)
            tail = as_type(tail.reshape(1, -1), states.tails.dtype)
            return States(put(states.matrices, matrix, place), put(states.tails, tail, place))

        out = lax.fori_loop(0, wave.num_chunks, put_rows, out)
        held = lax.fori_loop(0, one_of(self.tables.ends, index), put_end, held)
        kept, stop = (one_of(self.tables.kept, index + end) for end in (0, 1))
        return out, held, lax.fori_loop(kept, stop, keep, states)

    def _begun(self, index: Array, mixed: Array, held: Array) -> WaveInputs:
        """Read what the chunks of a wave begin with."""
        tables, sizes, before = self.tables, self.sizes, self.net.kernel - 1
        first, stop = (one_of(tables.first, index + end) for end in (0, 1))
        starts, lens, sources, targets = (
            part(table, first, sizes.chunks)
            for table in (tables.rows, tables.lens, tables.sources, tables.targets)
        )
        lens = jnp.where(jnp.arange(sizes.chunks) < stop - first, lens, 0)
        rows = jax.vmap(lambda start: part(mixed, start, sizes.rows))(starts)
        # Rows after a chunk's last one are others', perhaps with NaN.
        inside = jnp.arange(sizes.rows) < lens[:, None]
        rows = jnp.where(inside[..., None], rows, 0)
        places = part(tables.before, first * before, sizes.chunks * before)
        earlier = chosen(mixed, places).reshape(sizes.chunks, before, -1)
        convolved, rest = jnp.split(rows, (self.net.convolved,), axis=2)
        inputs = jnp.concatenate((earlier[..., : self.net.convolved], convolved), 1)
        state = chosen(held, sources)
        return WaveInputs(first, stop - first, starts, lens, targets, inputs, rest, state)


def computed(net: DeltaNet, weights: RuleWeights, eps: float, wave: WaveInputs) -> Computed:
    """Compute the outputs of chunks, and what their end states are made of."""
    chunks, size = wave.rows.shape[:2]
    values = net.num_value_heads * net.value_dim
    ends = [values + heads * net.num_value_heads for heads in range(3)]
    gate, strength, step, _ = jnp.split(wave.rows.astype(jnp.float32), ends, axis=2)
    q, k, v = _convolved(net, weights, wave.inputs, size)
    inside = (jnp.arange(size) < wave.lens[:, None])[..., None]

    def by_head(x: Array) -> Array:
        """[n, L, R Hk] -> [n, Hk, R, L], 0 after the last row."""
        return _grouped(net, jnp.where(inside, x, 0)[..., None])[..., 0]

    log = by_head(weights.decay * jax.nn.softplus(step + weights.bias)).cumsum(-1)
    strengths = by_head(jax.nn.sigmoid(strength))[..., None]
    row = jnp.arange(size)
    past = row[:, None] >= row
    decays = jnp.exp(jnp.where(past, log[..., :, None] - log[..., None, :], -jnp.inf))
    shrunk = jnp.exp(log)[..., None]
    of_keys, of_queries = (
        _grouped(net, jnp.moveaxis(_per_head(x, wave.state, (3, 2)), 1, 2)) * shrunk for x in (k, q)
    )
    system = _per_head(k, k, (3, 3))[:, :, None] * decays * strengths
    new = (v - of_keys) * strengths
    written = _product(inverse(system), new)
    out = _product(_per_head(q, k, (3, 3))[:, :, None] * decays, written) + of_queries
    out = out.transpose(0, 3, 1, 2, 4).reshape(chunks, size, net.num_value_heads, -1)
    out = out * lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + eps) * weights.norm
    return Computed(out.reshape(gate.shape) * jax.nn.silu(gate), k, written, log)


def _convolved(
    net: DeltaNet, weights: RuleWeights, inputs: Array, size: int
) -> tuple[Array, Array, Array]:
    """Return q and k [n, Hk, L, Dk], normed, and v [n, Hk, R, L, Dv]."""
    wide = inputs.astype(jnp.float32)
    summed = sum(wide[:, tap : tap + size] * weights.conv[tap] for tap in range(net.kernel))
    keys = net.num_key_heads * net.key_dim
    q, k, v = jnp.split(jax.nn.silu(summed), (keys, 2 * keys), axis=2)
    q, k = (x.reshape(*x.shape[:2], net.num_key_heads, -1).swapaxes(1, 2) for x in (q, k))
    q, k = (x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + EPS) for x in (q, k))
    return q * net.key_dim**-0.5, k, _grouped(net, v)


def _grouped(net: DeltaNet, x: Array) -> Array:
    """Group columns by key head: [n, L, ...] of R Hk heads in order -> [n, Hk, R, L, columns]."""
    heads = x.reshape(*x.shape[:2], net.num_key_heads, net.num_value_heads // net.num_key_heads, -1)
    return heads.transpose(0, 2, 3, 1, 4)


def end_state(chunk: Computed, state: Array) -> Array:
    """Return the state [Hk, Dk, R Dv] after one chunk, which began with `state`."""
    total = chunk.log[..., -1:]
    new = chunk.written * jnp.exp(total - chunk.log)[..., None]  # [Hk, R, L, Dv]
    new = new.swapaxes(1, 2).reshape(*chunk.k.shape[:2], -1)
    kept = jnp.exp(total).repeat(chunk.written.shape[-1], axis=-1).reshape(len(state), 1, -1)
    return state * kept + contract(chunk.k, new, ((1,), (1,)), ((0,), (0,)))


def inverse(system: Array) -> Array:
    """Invert matrices [..., L, L] with a unit diagonal, whose lower triangle is given.

    Blocks of the diagonal are inverted, each made of two that were inverted before: few products,
    where solving row by row would be a long loop on a TPU. It keeps the digits that an inverse by
    powers loses where tokens repeat.
    """
    size = system.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    inverted = jnp.broadcast_to(jnp.eye(size), system.shape)
    for block in (1 << level for level in range(size.bit_length() - 1)):
        pair = row // (2 * block) == column // (2 * block)
        corner = jnp.where(pair & (row // block > column // block), system, 0)
        inverted = inverted - (
            corner if block == 1 else _product(_product(inverted, corner), inverted)
        )
    return inverted


def matrix_shape(net: DeltaNet) -> tuple[int, int, int]:
    """Shape of the matrices of a state."""
    values = net.num_value_heads // net.num_key_heads * net.value_dim
    return net.num_key_heads, net.key_dim, values


def _per_head(left: Array, right: Array, over: tuple[int, int]) -> Array:
    """Multiply [n, Hk, ...] with [n, Hk, ...]."""
    return contract(left, right, ((over[0],), (over[1],)), ((0, 1), (0, 1)))


def _product(left: Array, right: Array) -> Array:
    """Multiply matrices [n, Hk, R, ...]."""
    return contract(left, right, ((4,), (3,)), ((0, 1, 2), (0, 1, 2)))


def _one(x: Array, place: Array) -> Array:
    return part(x, place, 1)[0]
