"""Settings that models with layers of linear attention do not support."""

from collections.abc import Iterator

from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError


def refuse_with_states(model: DecoderConfig, config: ModelConfig, precision: str) -> None:
    """Raise ConfigError for a setting that a model with linear layers does not support.

    Args:
        model: its configuration.
        config: the settings.
        precision: the precision of its linear projections, as `choose_precision` has decided.
    """
    for reason in _unsupported(config, precision) if model.delta_net is not None else ():
        raise ConfigError(f"{model.architecture} has layers of linear attention: {reason}")


def _unsupported(config: ModelConfig, precision: str) -> Iterator[str]:
    if config.tensor_parallel > 1:
        yield f"--tensor-parallel is {config.tensor_parallel}; supported: 1"
    if config.deterministic:
        yield "not supported with --deterministic: states are computed in chunks of all sizes"
    if precision != "full":
        yield f"products are in {precision}; supported: weights that are not quantised"
    if config.attention not in ("auto", "torch", "triton"):
        yield f"--attention is {config.attention}; supported: torch, triton"
