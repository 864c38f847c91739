"""The application: a deployment of engines, and a deployment of the HTTP layer before it."""

import hashlib
import logging
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from gpuscore import __version__
from gpuscore.ray.host import EngineHost, HostSettings
from gpuscore.ray.ingress import Ingress
from gpuscore.ray.policy import ExpectedWait
from gpuscore.ray.router import MOST_PARTS, NextHomeRouter
from gpuscore.ray.settings import AppSettings, RayConfig, read_arguments

PROBES = 64  # requests beside the scoring ones that an ingress takes at a time
HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 30.0  # seconds


def app(arguments: dict[str, Any]) -> Application:
    """Return the application, for `serve run gpuscore.ray:app NAME=VALUE ...` and `serve deploy`.

    Args:
        arguments: settings by the names of `gpuscore serve`'s flags, with underscores, and by the
            names of `RayConfig`'s fields.

    Raises:
        ConfigError: an argument is unknown, has no meaning here, or has an invalid value.
    """
    settings = read_arguments(arguments)
    logging.getLogger("ray.serve").info("gpuscore %s with %s", __version__, dict(arguments))
    # Replicas with other settings are others: requests may be made for one kind only.
    told = repr((__version__, asdict(settings.model), asdict(settings.engine)))
    version = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    return _ingress(settings).bind(settings, version, _engines(settings, version))


def _engines(settings: AppSettings, version: str) -> Application:
    config, server = settings.ray, settings.server
    host = HostSettings(settings.model, settings.engine, server.max_queue_seconds, version)
    deployment = serve.deployment(
        EngineHost,
        name="engine",
        **_replicas(config),
        ray_actor_options=_actor(settings),
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=settings.engine.max_queued_requests,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{NextHomeRouter.__module__}.{NextHomeRouter.__name__}",
            request_router_kwargs={"num_fallback_replicas": MOST_PARTS - 1},
        ),
        graceful_shutdown_timeout_s=server.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
    )
    return deployment.bind(host)


def _ingress(settings: AppSettings) -> serve.Deployment:
    return serve.deployment(
        Ingress,
        name="http",
        num_replicas=settings.ray.http_replicas,
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=settings.engine.max_queued_requests + PROBES,
        graceful_shutdown_timeout_s=settings.server.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
    )


def _replicas(config: RayConfig) -> dict[str, Any]:
    """Return the number of engines, or how it is scaled."""
    if config.most == config.min_replicas:
        return {"num_replicas": config.min_replicas}
    policy = AutoscalingPolicy(
        policy_function=f"{ExpectedWait.__module__}:{ExpectedWait.__name__}",
        policy_kwargs={"target_wait": config.target_wait},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.most,
            upscale_delay_s=config.upscale_delay,
            downscale_delay_s=config.downscale_delay,
            look_back_period_s=config.look_back,
            policy=policy,
        )
    }


def _actor(settings: AppSettings) -> dict[str, Any]:
    """Return the resources that Ray reserves for an engine."""
    config, options = settings.ray, {"num_cpus": settings.ray.num_cpus}
    gpus = config.num_gpus
    if gpus is None:
        has_gpus = settings.model.device != "cpu" and ray.is_initialized()
        gpus = 1.0 if has_gpus and ray.cluster_resources().get("GPU", 0) else 0.0
    return (
        options
        | ({"num_gpus": gpus} if gpus else {})
        | ({"resources": config.custom} if config.custom else {})
    )
