"""The configuration: all settings (`fields`), their options and flags, and sources of values."""

from gpuscore.config.fields import (
    API_KEY,
    API_KEY_VARIABLE,
    CONFIGS,
    EngineConfig,
    FileConfig,
    ModelConfig,
    RequestLimits,
    ServerConfig,
)

__all__ = [
    "API_KEY",
    "API_KEY_VARIABLE",
    "CONFIGS",
    "EngineConfig",
    "FileConfig",
    "ModelConfig",
    "RequestLimits",
    "ServerConfig",
]
