"""The application: a deployment of engines, and a deployment of the HTTP layer before it.

Their numbers of replicas, scaling and reserved resources are Ray's own settings: `deployments` of
the Serve config, under the names `engine` and `http`.
"""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from gpuscore.ray.engine import EngineHost
from gpuscore.ray.ingress import Ingress
from gpuscore.ray.router import NamedFirst
from gpuscore.ray.settings import read_arguments

ONGOING = 64  # requests that an engine has at a time; further ones wait for it
PROBES = 64  # requests, besides scoring ones, that an ingress takes at a time


def app(arguments: dict[str, Any]) -> Application:
    """Return the application, for `serve run gpuscore.ray:app NAME=VALUE ...` and `serve deploy`.

    Args:
        arguments: settings by the names of `gpuscore serve`'s flags, with underscores.

    Raises:
        ConfigError: an argument is unknown, has no meaning here, or has an invalid value.
    """
    settings = read_arguments(arguments)
    on_gpu = settings.model.device != "cpu" and ray.is_initialized()
    gpus = 1 if on_gpu and ray.cluster_resources().get("GPU", 0) else 0
    engines = serve.deployment(
        EngineHost,
        name="engine",
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=ONGOING,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{NamedFirst.__module__}.{NamedFirst.__name__}"
        ),
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
    )
    ingress = serve.deployment(
        Ingress,
        name="http",
        max_ongoing_requests=settings.engine.max_queued_requests + PROBES,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
    )
    return ingress.bind(settings, engines.bind(settings))
