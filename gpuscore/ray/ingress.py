"""The ingress deployment: the HTTP layer of `gpuscore serve`, with the cluster's engines."""

import asyncio
import os

from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscore.config.options import changed
from gpuscore.config.served import served_models
from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.served import ServedModel
from gpuscore.models.hub import model_directory
from gpuscore.processes.serving import load_model, read_files
from gpuscore.ray.engine import POLL, ClusterEngine, Facts, Handle, all_facts
from gpuscore.ray.settings import AppSettings
from gpuscore.server.api.app import create_app
from gpuscore.server.http.headers import read_api_keys
from gpuscore.server.observe.operations import Operations
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.server.service import ScoringService
from gpuscore.system.heap import return_large_blocks
from gpuscore.system.log import LogWriter


class IngressHost:
    """A replica of the ingress deployment, ready once an engine with its settings is ready.

    Args:
        settings: the settings of the application.
        engines: the handle of the engine deployment.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: AppSettings, engines: Handle
    ) -> None:
        return_large_blocks(LARGE)
        server = settings.server
        keys = read_api_keys(server)
        (chosen,) = served_models(settings.model, server)
        directory = await asyncio.to_thread(
            model_directory, chosen.config.model, chosen.config.revision
        )
        files = await asyncio.to_thread(read_files, directory, server.family, chosen.sources)
        usable: list[Facts] = []
        while not usable:
            await asyncio.sleep(POLL)
            found = await all_facts(engines)
            usable = [x for x in found if (x.model, x.engine) == (settings.model, settings.engine)]
        engine = ClusterEngine(engines, settings.engine, usable[0])
        shown = changed(chosen.config, settings.engine)
        served = ServedModel(chosen.name, chosen.others)
        served.loaded = load_model(files, settings.limits, engine, shown)
        service = self._service = ScoringService([served], server.max_queue_seconds)
        self._log = LogWriter()
        self._tracer = read_tracer(os.environ)
        operations = Operations(service, self._log, self._tracer, server.log_requests)
        self._gate = create_app(service, server, keys, operations)
        self._watching = asyncio.create_task(operations.watch_loop())

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Ray's name
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            """Pass a request to the gate, without the application's prefix in its path. Remove
            the request's id from the gate's answer, because Ray's proxy adds it, too."""

            async def send_without_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                    message = {**message, "headers": kept}
                await send(message)

            path = scope.get("path", "").removeprefix(scope.get("root_path", "")) or "/"
            await self._gate({**scope, "path": path, "root_path": ""}, receive, send_without_id)

        return answer

    def __del__(self) -> None:
        if not hasattr(self, "_gate"):  # the start failed
            return
        self._watching.cancel()
        self._service.close()
        self._log.close()
        if self._tracer is not None:
            self._tracer.close()


# Ray's decorator makes a class whose app is built after the constructor.
Ingress = serve.ingress()(IngressHost)
