"""Configuration: frozen dataclasses whose fields carry their own help text.

`add_flags` turns the fields into command-line flags and `from_flags` reads them back, so that a
default, its help and its type are written once.
"""

import argparse
import types
import typing
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from gpuscore.errors import ConfigError

ConfigT = TypeVar("ConfigT")


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None
) -> Any:
    """A configuration field: its default, what it means, and the values it may take."""
    return field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to serve and on what."""

    model: str = field(
        default="demo",
        metadata={
            "help": "model directory, hub name such as Qwen/Qwen3-0.6B, or 'demo' (comes with "
            "gpuscore)",
            "positional": True,
        },
    )
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "number format of weights and activations; auto: the checkpoint's own, or float32 on a CPU "
        "without instructions for it",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    compile: str = option(
        "auto",
        "fuse element-wise work with torch.compile, on a CPU with a C++ compiler; auto: models of "
        "100 million parameters or more",
        choices=("auto", "on", "off"),
    )
    max_batch_tokens: int | None = option(
        None, "tokens of one forward pass (default 2048 on CPU, 16384 on CUDA)", minimum=1
    )
    max_model_len: int | None = option(
        None, "longest prompt in tokens (default: the model's max_position_embeddings)", minimum=1
    )
    kv_cache_tokens: int | None = option(
        None,
        "query tokens whose keys and values are kept at a time (default: four prompts of full "
        "length, at least 65536, within half of the free memory)",
        minimum=1,
    )
    threads: int | None = option(
        None, "CPU threads of the model (default: torch's own choice)", minimum=1
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much work may wait."""

    max_queued_requests: int = option(1024, "requests in flight before 429", minimum=1)
    max_queued_tokens: int = option(
        4 * 1048576, "tokens in flight before 429 (one request is always admitted)", minimum=1
    )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The largest request that is accepted."""

    max_items: int = option(10000, "items of one request", minimum=1)
    max_labels: int = option(128, "labels of one item", minimum=1)
    max_request_tokens: int = option(
        1048576, "tokens of one request, the shared part counted once", minimum=1
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to bind; another than loopback needs an API key")
    port: int = option(8000, "port to bind", minimum=0)
    served_model_name: str | None = option(
        None, "name of the model in requests and answers (default: the model as given)"
    )
    api_key_file: str | None = option(
        None, "file with one API key per line; GPUSCORE_API_KEY holds a single one"
    )
    insecure: bool = option(False, "allow a non-loopback address without an API key")
    max_body_bytes: int = option(16 * 2**20, "bytes of a request body before 413", minimum=1)
    max_header_bytes: int = option(16 * 2**10, "bytes of a request head before 431", minimum=256)
    max_headers: int = option(100, "header fields of a request before 431", minimum=1)
    max_connections: int = option(4096, "open connections; more are closed at once", minimum=1)
    max_inflight_per_key: int = option(
        256, "requests in flight of one API key before 429", minimum=1
    )
    header_timeout: float = option(10.0, "seconds for a complete request head", minimum=0.1)
    body_timeout: float = option(30.0, "seconds for a complete request body", minimum=0.1)
    request_timeout: float = option(120.0, "seconds for an answer before 504", minimum=0.1)
    drain_timeout: float = option(
        60.0, "seconds that SIGTERM leaves to what is in flight", minimum=0.1
    )


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add one flag per field of a configuration dataclass."""
    group = parser.add_argument_group((config.__doc__ or "").rstrip("."))
    hints = typing.get_type_hints(config)
    for item in fields(config):
        _add_flag(group, item, hints[item.name])


def from_flags(config: type[ConfigT], values: argparse.Namespace) -> ConfigT:
    """The dataclass that the parsed flags describe; raises ConfigError on a value out of range."""
    chosen = {item.name: getattr(values, item.name) for item in fields(config)}  # type: ignore[arg-type]
    return checked(config(**chosen))


def checked(config: ConfigT) -> ConfigT:
    """The same configuration, its minimums verified."""
    for item in fields(config):  # type: ignore[arg-type]
        value, minimum = getattr(config, item.name), item.metadata.get("minimum")
        if value is not None and minimum is not None and not value >= minimum:
            raise ConfigError(f"{_flag(item)} must be at least {minimum}, got {value}")
        choices = item.metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(f"{_flag(item)} must be one of {', '.join(choices)}, got {value}")
    return config


def _flag(item: "Field[Any]") -> str:
    return "--" + item.name.replace("_", "-")


def _add_flag(group: Any, item: "Field[Any]", hint: Any) -> None:
    meta, default = item.metadata, None if item.default is MISSING else item.default
    if meta.get("positional"):
        group.add_argument(
            item.name, nargs="?", metavar="MODEL", default=default, help=meta["help"]
        )
        return
    if hint is bool:
        group.add_argument(_flag(item), action="store_true", help=meta["help"])
        return
    text = meta["help"] if default is None else f"{meta['help']} (default {default})"
    group.add_argument(
        _flag(item),
        type=_scalar(hint),
        default=default,
        choices=meta.get("choices") or None,
        metavar=None if meta.get("choices") else _scalar(hint).__name__.upper(),
        help=text,
    )


def _scalar(hint: Any) -> Any:
    """`int | None` -> int."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
