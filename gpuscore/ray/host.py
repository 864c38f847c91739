"""The engine deployment: each replica has one device, and on it the engine of `gpuscore serve`."""

import asyncio
from dataclasses import replace
from time import monotonic

from msgspec import structs
from ray import serve
from ray.runtime_context import get_runtime_context

from gpuscore.errors import GpuscoreError, Unavailable
from gpuscore.models.hub import model_directory
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.worker.wire import (
    Failure,
    Message,
    ProtocolError,
    Result,
    Score,
    check_request,
    decoder,
    encode,
)
from gpuscore.ray.settings import AppSettings
from gpuscore.system.log import chosen_format
from gpuscore.types.batch import BackendLimits
from gpuscore.types.stats import ReplicaState


class Facts(Message, frozen=True):
    """A loaded model; `settings` are `AppSettings.of_engine`, with which the replica started."""

    limits: BackendLimits
    about: str
    settings: str
    state: ReplicaState


def model_of(limits: BackendLimits) -> str:
    """Return all that a request depends on: an engine takes requests made for an equal model."""
    return repr(limits.model)


class EngineHost:
    """A replica of the engine deployment. The engine's process is supervised and started again as
    `gpuscore serve` does it; Ray replaces the replica if the process cannot be kept running."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        context = serve.get_replica_context()
        self._name, self._node = context.replica_id.unique_id, get_runtime_context().get_node_id()
        self._settings, self._decode = settings, decoder(Score)
        await asyncio.to_thread(self._start)
        self._model = model_of(self._limits)

    def _start(self) -> None:
        settings = self._settings
        directory = model_directory(settings.model.model, settings.model.revision)
        style = chosen_format()
        model = settings.model.unmeasured()  # no host knows what another one would measure
        self._replicas = start_replicas(directory, model, settings.engine, log_format=style)
        try:
            self._limits = self._replicas.wait_ready()
        except GpuscoreError:
            self._replicas.close()
            raise

    async def facts(self) -> bytes:
        """Return the `Facts` of the model, with the state of the engine."""
        (own,) = self._replicas.states()
        state = replace(own, replica=self._name, device=self._node)
        about = self._replicas.wait_planned()
        return encode(Facts(self._limits, about, self._settings.of_engine, state))

    async def score(self, frame: bytes, model: str, replica: str) -> bytes:
        """Return the `Result` or `Failure` of a `Score`, whose deadline is the time that is left.

        Cancelling the call drops work not launched yet.

        Args:
            model: the `model_of` that the request was made for.
            replica: the one that was wanted; `gpuscore.ray.router` reads it.
        """
        try:
            if model != self._model:
                raise Unavailable("the engines change to another model", retry_after=1)
            request = check_request(self._decode(frame).request, self._limits)
            deadline = monotonic() + (request.deadline or 0.0)
            (outcome,) = self._replicas.score_all([structs.replace(request, deadline=deadline)])
            if isinstance(outcome, GpuscoreError):
                raise outcome
            return encode(Result(0, await asyncio.wrap_future(outcome)))
        except (GpuscoreError, ProtocolError) as error:
            return encode(Failure.of(0, error))

    def check_health(self) -> None:
        """Raise EngineFailed once the engine's process cannot be kept running."""
        (engine,) = self._replicas.engines
        if engine.ended.done():
            engine.ended.result()

    async def __del__(self) -> None:
        replicas = getattr(self, "_replicas", None)  # none if the start failed
        if replicas is not None:
            await asyncio.to_thread(replicas.close)
