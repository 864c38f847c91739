"""The arguments of the application: the settings of `gpuscore serve`, by their names.

Ray's command line passes all values as text; its configuration file keeps their types.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpuscore.config import CONFIGS, EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import served_models
from gpuscore.config.sources import OPTIONS, SHOWS_ALL, read_settings
from gpuscore.errors import ConfigError

# Settings of `gpuscore serve` that Ray decides here.
RAYS = {"host", "port", "insecure", "allowed_hosts", "keep_alive_timeout", "max_header_bytes"}
RAYS |= {"devices", "tensor_parallel"}


class AppSettings(NamedTuple):
    """The settings that the application's arguments give."""

    model: ModelConfig
    server: ServerConfig
    limits: RequestLimits
    engine: EngineConfig


def read_arguments(arguments: Mapping[str, Any]) -> AppSettings:
    """Return the settings that the arguments name, and defaults for the others.

    Raises:
        ConfigError: an unknown argument, one without a meaning here, or an invalid value.
    """
    for name in arguments:
        if name in RAYS:
            raise ConfigError(
                f"argument {name} has no meaning here: Ray binds the address, gives each engine a "
                "device, and serves one model per application"
            )
        if name not in OPTIONS:
            raise ConfigError(f"there is no argument {name}; {SHOWS_ALL}")
    texts = {name: value for name, value in arguments.items() if isinstance(value, str)}
    read = {name: OPTIONS[name].from_text(text) for name, text in texts.items()}
    settings = read_settings({**arguments, **read}, {})
    chosen = AppSettings(*(settings.make(kind) for kind in CONFIGS))
    if len(served_models(chosen.model, chosen.server)) > 1:
        raise ConfigError("argument model names several models: deploy one application for each")
    return chosen
