"""A rank's part of a model under `--tensor-parallel`: its heads, inner columns and vocabulary rows.

The division is Megatron-LM's (Shoeybi et al., 2019). In attention and MLP, a rank computes a part
of the first product's outputs, multiplies it by the second weight, and the ranks add the results.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.common.quantization import Precision
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

# Parts that are divided by rows, and what their rows belong to.
_BY_ROWS = {
    **dict.fromkeys(("q", "q_bias"), "heads"),
    **dict.fromkeys(("k", "k_bias", "v", "v_bias"), "kv_heads"),
    **dict.fromkeys(("gate", "gate_bias", "up", "up_bias"), "inner"),
    **dict.fromkeys(("expert_gate", "expert_up"), "inner"),
    **dict.fromkeys(("embed", "lm_head"), "tokens"),
}
# Parts that are divided by columns; the ranks' products with them are added up, and one rank adds
# their biases.
_BY_COLUMNS = frozenset({"o", "down", "expert_down"})


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Rows (dim 0) or columns (dim 1) `start` to `stop - 1` of a tensor."""

    dim: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(self.start, self.stop),)


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of one rank among the ranks that share a model; by default there is only one."""

    rank: int = 0
    ranks: int = 1

    def part_of(self, model: DecoderConfig) -> DecoderConfig:
        """Return the configuration of this rank's part of the model.

        Raises:
            ConfigError: the model cannot be divided among so many ranks.
        """
        if self.ranks == 1:
            return model
        if reason := _why_not(model, self.ranks):
            raise ConfigError(f"--tensor-parallel {self.ranks}: {reason}")
        mixture = model.mixture and replace(
            model.mixture, intermediate_size=len(self._inner(model, experts=True))
        )
        return replace(
            model,
            mixture=mixture,
            num_heads=model.num_heads // self.ranks,
            num_kv_heads=max(1, model.num_kv_heads // self.ranks),
            intermediate_size=len(self._inner(model, experts=False)),
            vocab_size=len(self.range_of(model.vocab_size)),
        )

    def slice_of(self, part: str, model: DecoderConfig, rows: int) -> ShardSlice | None:
        """Return the slice of a tensor that this rank reads; None = all of it.

        Args:
            part: the tensor, named as in the weight tables.
            model: the whole model.
            rows: the number of rows of the tensor.
        """
        if self.ranks == 1:
            return None
        experts = part.startswith("expert")
        if part in _BY_COLUMNS:
            owned = self._heads(model) if part == "o" else self._inner(model, experts)
            return ShardSlice(1, owned.start, owned.stop)
        match _BY_ROWS.get(part):
            case "heads":
                owned = self._heads(model)
            case "kv_heads":
                owned = self._kv_heads(model)
            case "inner":
                owned = self._inner(model, experts)
            case "tokens" if part == "embed" or model.classes is None:
                owned = self.range_of(rows)
            case _:  # all ranks read norms, routers and the few rows of a head over classes
                return None
        return ShardSlice(0, owned.start, owned.stop)

    def range_of(self, count: int) -> range:
        """Return this rank's share of range(count): consecutive numbers, in the order of ranks."""
        return range(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)

    def _heads(self, model: DecoderConfig) -> range:
        owned = self.range_of(model.num_heads)
        return range(owned.start * model.head_dim, owned.stop * model.head_dim)

    def _kv_heads(self, model: DecoderConfig) -> range:
        """Rows of the KV heads that this rank's heads read; several ranks may share one."""
        first = self.rank * model.num_kv_heads // self.ranks
        count = max(1, model.num_kv_heads // self.ranks)
        return range(first * model.head_dim, (first + count) * model.head_dim)

    def _inner(self, model: DecoderConfig, experts: bool) -> range:
        if experts and model.mixture is not None:
            return self.range_of(model.mixture.intermediate_size)
        return self.range_of(model.intermediate_size)


ALL = Shard()  # the whole model


def settings_of_a_rank(config: ModelConfig, device: str) -> ModelConfig:
    """Return the settings with a rank's part of `kv_cache_size`, which is for a whole device.

    On a GPU each rank has a device of its own; a CPU is shared.
    """
    ranks = config.tensor_parallel
    if ranks == 1 or device != "cpu":
        return config
    cache = config.kv_cache_size
    return replace(config, kv_cache_size=None if cache is None else cache // ranks)


def check_tensor_parallel(config: ModelConfig) -> None:
    """Raise ConfigError for a setting that is not supported with `--tensor-parallel`."""
    for reason in _unsupported(config) if config.tensor_parallel > 1 else ():
        raise ConfigError(f"--tensor-parallel {config.tensor_parallel}: {reason}")


def refuse_quantized(precision: Precision, ranks: int) -> None:
    """Raise ConfigError for a quantised checkpoint, which ranks cannot divide."""
    if ranks > 1 and precision != "full":
        raise ConfigError(
            f"--tensor-parallel {ranks}: the checkpoint is quantised; supported: weights that are "
            "not quantised"
        )


def _unsupported(config: ModelConfig) -> Iterator[str]:
    if config.backend != "torch":
        yield f"--backend is {config.backend}; supported: torch"
    if config.deterministic:
        yield (
            "not supported with --deterministic: the order in which ranks add up a row depends on "
            "the row's place in the batch"
        )
    if config.quantization != "auto":
        yield f"--quantization is {config.quantization}; supported: weights that are not quantised"
    if config.attention not in ("auto", "torch", "triton"):
        yield f"--attention is {config.attention}; supported: torch, triton"
    if config.cuda_graph_tokens:
        yield f"--cuda-graph-tokens is {config.cuda_graph_tokens}; supported: 0"


def _why_not(model: DecoderConfig, ranks: int) -> str | None:
    """Say why the model cannot be divided; None if it can."""
    heads = model.num_heads
    kv_heads = model.num_kv_heads
    if heads % ranks:
        return f"the model's {heads} attention heads cannot be divided equally"
    if kv_heads % ranks and ranks % kv_heads:
        return f"the model's {kv_heads} KV heads are neither a multiple nor a divisor of {ranks}"
    inner = model.mixture.intermediate_size if model.mixture else model.intermediate_size
    if min(model.vocab_size, model.intermediate_size, inner) < ranks:
        return f"the model has only {inner} inner columns and {model.vocab_size} tokens"
    return None
