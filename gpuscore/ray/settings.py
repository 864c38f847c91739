"""The arguments of the application: gpuscore's settings by their names, and Ray's own.

The command line of Ray gives all values as text, a configuration file with their types.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import Option, checked, duration, option, options
from gpuscore.config.sources import OPTIONS, read_settings
from gpuscore.errors import ConfigError

_PROXY = "is a matter of Ray's proxy"
_ONE_MODEL = "is for several models; deploy an application for each, with its own route_prefix"
# Settings of `gpuscore serve` that have no meaning here, with the reason.
REFUSED = {
    **dict.fromkeys(("host", "port"), f"{_PROXY}: set http_options of the Serve config"),
    **dict.fromkeys(("allowed_hosts", "keep_alive_timeout"), _PROXY),
    "models": _ONE_MODEL,
    "devices": "has no meaning here: Ray places one replica on each device; set max_replicas",
    "tensor_parallel": "is not supported: a replica has one device; start gpuscore serve instead",
    "metrics_port": "is not supported: scrape GET /metrics, or Ray's own metrics",
    "insecure": "has no meaning here: Ray's proxy binds the address, whether or not there are keys",
}


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Ray Serve."""

    min_replicas: int = option(1, "fewest engines, each on a device of its own", minimum=1)
    max_replicas: int | None = option(
        None, "most engines; more than min_replicas: scaled", unset="min_replicas", minimum=1
    )
    target_wait: float = option(
        5.0,
        "seconds of queued work per engine to scale for",
        minimum=0.01,
        maximum=3600,
        metavar="SECONDS",
    )
    upscale_delay: float = duration(30.0, "time for which more engines must be wanted", minimum=0.0)
    downscale_delay: float = duration(
        600.0, "time for which fewer engines must be wanted", minimum=0.0
    )
    look_back: float = duration(30.0, "time over which the queued work is averaged")
    num_gpus: float | None = option(
        None,
        "GPUs of an engine; a share lets engines share one",
        unset="0 with device=cpu, otherwise 1 if the cluster has GPUs now",
        minimum=0.0,
        maximum=1.0,
    )
    num_cpus: float = option(1.0, "CPUs of an engine, as Ray counts them", minimum=0.0)
    resources: str | None = option(
        None,
        "further resources of an engine, such as TPU=1, separated by commas",
        unset="none",
        metavar="NAME=AMOUNT",
    )
    http_replicas: int = option(
        1, "processes that answer HTTP and turn text into token ids", minimum=1
    )
    max_ongoing_requests: int = option(
        64,
        "requests that an engine has at a time; further requests of its queries go to the next "
        "engine, and wait if all are full",
        minimum=1,
    )

    @property
    def most(self) -> int:
        """The most engines."""
        return self.min_replicas if self.max_replicas is None else self.max_replicas

    @property
    def custom(self) -> dict[str, float]:
        """The further resources; raises ConfigError if they cannot be read."""
        amounts: dict[str, float] = {}
        for pair in self.resources.split(",") if self.resources else ():
            name, _, amount = pair.partition("=")
            try:
                amounts[name.strip()] = float(amount)
            except ValueError as error:
                raise ConfigError(f"resources {pair}: must be NAME=AMOUNT") from error
        return amounts


@dataclass(frozen=True, slots=True)
class AppSettings:
    """Everything that the application's arguments say."""

    model: ModelConfig
    server: ServerConfig
    limits: RequestLimits
    engine: EngineConfig
    ray: RayConfig


def read_arguments(arguments: Mapping[str, Any]) -> AppSettings:
    """Return the settings that the arguments name, and defaults for the others.

    Raises:
        ConfigError: an unknown argument, one without a meaning here, or an invalid value.
    """
    own = {item.name: item for item in options(RayConfig)}
    for name in arguments:
        if name in REFUSED:
            raise ConfigError(f"argument {name} {REFUSED[name]}")
        if name not in OPTIONS and name not in own:
            raise ConfigError(f"there is no argument {name}{_closest(name, [*own, *OPTIONS])}")
    values = {name: _read(OPTIONS.get(name) or own[name], arguments[name]) for name in arguments}
    settings = read_settings({k: v for k, v in values.items() if k in OPTIONS}, {})
    config = checked(RayConfig(**{k: v for k, v in values.items() if k in own}))
    if config.most < config.min_replicas:
        raise ConfigError(f"max_replicas {config.most} is below min_replicas {config.min_replicas}")
    config.custom  # noqa: B018  (raises)
    return AppSettings(
        settings.make(ModelConfig),
        settings.make(ServerConfig),
        settings.make(RequestLimits),
        settings.make(EngineConfig),
        config,
    )


def _read(item: Option, value: Any) -> Any:
    return item.from_text(value) if isinstance(value, str) else item.read(value)


def _closest(name: str, known: list[str]) -> str:
    closest = difflib.get_close_matches(name, known, n=1)
    return f"; the closest is {closest[0]}" if closest else ""
