"""The settings that a managed platform implies: where it puts the model, and which address it asks.

They count less than a file, a variable or a flag.
"""

from collections.abc import Mapping

from gpuscore.errors import ConfigError

SAGEMAKER, VERTEX, KSERVE = "sagemaker", "vertex", "kserve"
VERTEX_PORT = "AIP_HTTP_PORT"  # Vertex AI sets it in every container, and so asks for its routes
PORT_VARIABLES = {SAGEMAKER: "SAGEMAKER_BIND_TO_PORT", VERTEX: VERTEX_PORT}
# Who may ask is decided by the platform in front of the container, which can send no key of ours.
_BEHIND = {"host": "0.0.0.0", "port": 8080, "insecure": True}
IMPLIED: Mapping[str, Mapping[str, object]] = {
    SAGEMAKER: _BEHIND | {"model": "/opt/ml/model"},
    VERTEX: _BEHIND,
    "huggingface": _BEHIND | {"model": "/repository"},
    # Reached by whoever reaches the pod, so a key or --insecure must be chosen.
    KSERVE: {"host": "0.0.0.0", "port": 8080, "model": "/mnt/models"},
}


def named(routes: str | None) -> tuple[str, ...]:
    """Return the names in a value of `--routes`; raise ConfigError for an unknown one."""
    names = tuple(name.strip() for name in routes.split(",")) if routes else ()
    if not set(names) <= set(IMPLIED):
        raise ConfigError(f"--routes {routes}; supported: {', '.join(IMPLIED)}")
    return names


def implied(
    explicit: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[str, dict[str, object]]:
    """Return the source that implies settings, and these settings; none without a platform.

    Args:
        explicit: the values of flags, variables and file, by field name.
        environment: like os.environ; platforms set variables in it.

    Raises:
        ConfigError: a port that is no number, or a model that is in a bucket.
    """
    routes, source = explicit.get("routes"), f"--routes {explicit.get('routes')}"
    if routes is None and VERTEX_PORT in environment:
        routes, source = VERTEX, f"environment {VERTEX_PORT}"
    names = str(routes or "").replace(" ", "").split(",")
    implied_settings: dict[str, object] = {} if routes is None else {"routes": routes}
    for name in names:
        implied_settings |= IMPLIED.get(name, {})
        if variable := environment.get(PORT_VARIABLES.get(name, "")):
            implied_settings["port"] = _port(PORT_VARIABLES[name], variable)
    if VERTEX in names and environment.get("AIP_STORAGE_URI") and not explicit.keys() & _MODEL:
        raise ConfigError(
            "AIP_STORAGE_URI names a bucket, which gpuscore cannot read: name a model of the hub, "
            "or a directory of the image, by GPUSCORE_MODEL"
        )
    if "models" in explicit:
        implied_settings.pop("model", None)
    return source, implied_settings


_MODEL = {"model", "models"}


def _port(variable: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise ConfigError(f"{variable} must be a port, got {text[:60]}")
    return int(text)
