"""The ingress deployment: the HTTP layer of `gpuscore serve`, with the cluster's engines."""

import asyncio
import logging
import os
from contextvars import Context

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from gpuscore.config.options import changed
from gpuscore.config.served import served_models
from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.models.hub import model_directory
from gpuscore.processes.serving import read_files
from gpuscore.ray.engine import ClusterEngine, Handle
from gpuscore.ray.intake import Intake
from gpuscore.ray.messages import Facts, decode
from gpuscore.ray.settings import AppSettings
from gpuscore.server.api.app import create_app
from gpuscore.server.http.auth import read_api_keys
from gpuscore.server.observe.operations import Operations
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.service import ScoringService
from gpuscore.system.heap import return_large_blocks
from gpuscore.system.log import LogWriter, chosen_format

logger = logging.getLogger(__name__)
AGAIN = 0.2  # seconds between two questions for the facts of an engine


class IngressHost:
    """A replica of the ingress deployment, which is ready once an engine of its version is.

    Args:
        settings: of the application.
        version: of the settings, which the engines have, too.
        engines: the handle of the engine deployment.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: AppSettings, version: str, engines: Handle
    ) -> None:
        return_large_blocks(LARGE)
        server = settings.server
        self._keys = read_api_keys(server)
        (chosen,) = served_models(settings.model, server)
        directory = await asyncio.to_thread(
            model_directory, chosen.config.model, chosen.config.revision
        )
        files = await asyncio.to_thread(read_files, directory, server.family, chosen.sources)
        loop = asyncio.get_running_loop()
        facts = await loop.create_task(_facts(engines, version), context=Context())
        engine = ClusterEngine(engines, settings.engine, facts.limits)
        engine.heard(facts.state)
        prompts = files.prompts.prompts(facts.limits, settings.limits)
        served = ServedModel(chosen.name, chosen.others)
        served.loaded = LoadedModel(
            engine,
            prompts,
            about=facts.about,
            tokenizer_info=files.info,
            settings=changed(chosen.config, settings.engine),
        )
        self._settings = settings
        self._service = ScoringService([served], server.max_queue_seconds)
        self._log, style = LogWriter(), chosen_format()
        self._tracer = read_tracer(os.environ)
        self._operations = Operations(
            self._service,
            self._log,
            self._tracer,
            server.log_requests,
            log_format=style,
        )
        self._watching = loop.create_task(self._operations.watch_loop(), context=Context())

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray's name
        settings = self._settings
        app = create_app(self._service, settings.server, self._keys, self._operations)
        return Intake(app)

    def check_health(self) -> None:
        """Take part in Ray's health checks: they see whether the event loop answers."""

    def __del__(self) -> None:
        service = getattr(self, "_service", None)  # none if the start failed
        if service is None:
            return
        self._watching.cancel()
        service.close()
        self._log.close()
        if self._tracer is not None:
            self._tracer.close()


async def _facts(engines: Handle, version: str) -> Facts:
    """Return the facts of an engine with these settings, once there is one."""
    attempt = 0
    while True:
        try:
            facts = decode(await engines.facts.remote(attempt=attempt), Facts)
        except RayTaskError:
            raise
        except (RayError, RayServeException) as error:
            logger.warning("an engine was lost before it was ready: %s", type(error).__name__)
        else:
            if facts.version == version:
                return facts
        attempt += 1
        await asyncio.sleep(AGAIN)


# Ray's decorator makes a class whose app is built after the constructor.
Ingress = serve.ingress()(IngressHost)
