"""The routes of managed platforms, which `--routes` adds to our own.

They read and write bodies of our own routes. SageMaker and Vertex AI decide themselves who may ask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuscore.config.platforms import KSERVE, SAGEMAKER, VERTEX, named
from gpuscore.dialects import envelope, tensors
from gpuscore.dialects.dialect import Dialect
from gpuscore.dialects.paths import GENERATING_PATHS, OPEN_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.types.record import Headers

ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_CHOICES = {path: dialect for path, dialect in DIALECT_OF.items() if path not in GENERATING_PATHS}


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a server that depend on its settings.

    Args:
        dialects: by path, of bodies; our own dialects are always among them.
        ready: paths of probes that tell whether a model can score, by name; None is all models.
        live: paths of probes that tell whether the process is alive.
        documents: fixed answers by path, which need a key as other routes do.
    """

    dialects: Mapping[str, Dialect[Any]] = field(default_factory=lambda: DIALECT_OF)
    ready: Mapping[str, str | None] = field(default_factory=dict)
    live: Sequence[str] = ()
    documents: Mapping[str, Any] = field(default_factory=dict)


OWN_ROUTES = Routes()


def _sagemaker(headers: Headers) -> Dialect[Any]:
    """Return the dialect of the path in CustomAttributes; without any, the body's fields tell.

    Batch transform sends no CustomAttributes, so JSON lines have none.
    """
    paths = [value.decode("latin-1").strip() for name, value in headers if name == ATTRIBUTES]
    if not paths:
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        name = kind.decode("latin-1").partition(";")[0].strip().lower()
        return envelope.LINES if name == envelope.LINES.media_type else envelope.PLAIN
    if len(paths) > 1 or paths[0] not in _CHOICES:
        raise InvalidRequest(f"CustomAttributes must be one of {', '.join(_CHOICES)}")
    return _CHOICES[paths[0]]


def platform_routes(
    routes: str | None, models: Sequence[str], environment: Mapping[str, str]
) -> Routes:
    """Return the routes of a server.

    Args:
        routes: the value of `--routes`.
        models: the names of the served models.
        environment: like os.environ; Vertex AI chooses its paths there.

    Raises:
        ConfigError: an unknown platform, or a path of Vertex AI's that has another meaning here.
    """
    names = named(routes)
    dialects, ready, live = dict(DIALECT_OF), dict[str, str | None](), list[str]()
    documents: dict[str, Any] = {}
    if SAGEMAKER in names:
        dialects["/invocations"] = replace(envelope.PLAIN, choose=_sagemaker)
        ready["/ping"] = None
    if VERTEX in names:
        predict = environment.get("AIP_PREDICT_ROUTE") or "/vertex/predict"
        health = environment.get("AIP_HEALTH_ROUTE") or "/ready"
        if predict in DIALECT_OF or not predict.startswith("/") or not health.startswith("/"):
            raise ConfigError(
                f"AIP_PREDICT_ROUTE {predict} and AIP_HEALTH_ROUTE {health} must begin with /, and "
                "the first must be no route that has another body here"
            )
        dialects[predict] = envelope.VERTEX
        if health not in OPEN_PATHS:
            ready[health] = None
    if KSERVE in names:
        ready["/v2/health/ready"] = None
        live.append("/v2/health/live")
        documents["/v2"] = {"name": "gpuscore", "extensions": ["binary_tensor_data"]}
        for name in models:
            path = tensors.infer_path(name)
            dialects[f"{path}/infer"] = tensors.infer(name)
            ready[f"{path}/ready"] = name
            documents[path] = tensors.metadata(name)
    return Routes(dialects, ready, live, documents)
