"""The engine deployment: each replica has one device, and on it the engine of `gpuscore serve`."""

import asyncio
from dataclasses import replace
from hashlib import blake2b
from time import monotonic

from msgspec import structs
from ray import serve
from ray.runtime_context import get_runtime_context

from gpuscore.errors import GpuscoreError, Unavailable
from gpuscore.models.hub import model_directory
from gpuscore.processes.replicas.replicas import Replicas
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
from gpuscore.types.request import ScoreResult
from gpuscore.types.stats import ReplicaState


class Facts(Message, frozen=True):
    """A loaded model; `version` is the version of the settings that the replica started with."""

    limits: BackendLimits
    about: str
    version: str
    state: ReplicaState


def fingerprint(limits: BackendLimits) -> str:
    """Return a digest of all that a request depends on: models with equal digests take it."""
    names = ("identity", "vocab_rows", "classes", "max_model_len", "page_size")
    told = repr([getattr(limits, name) for name in names])
    return blake2b(told.encode(), digest_size=16).hexdigest()


class EngineHost:
    """A replica of the engine deployment. The engine's process is supervised and started again as
    `gpuscore serve` does it; Ray replaces the replica if the process cannot be kept running.

    Args:
        settings: of the application.
        version: of the settings.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: AppSettings, version: str
    ) -> None:
        context = serve.get_replica_context()
        self._name, self._node = context.replica_id.unique_id, get_runtime_context().get_node_id()
        self._settings, self._version = settings, version
        self._decode = decoder(Score)
        self._replicas = await asyncio.to_thread(self._start)
        try:
            self._limits = await asyncio.to_thread(self._replicas.wait_ready)
        except GpuscoreError:
            self._replicas.close()
            raise
        self._model = fingerprint(self._limits)

    def _start(self) -> Replicas:
        model, style = self._settings.model, chosen_format(self._settings.server.log_format)
        directory = model_directory(model.model, model.revision)
        # No host knows what another one would measure.
        return start_replicas(
            directory, model.unmeasured(), self._settings.engine, log_format=style
        )

    async def facts(self) -> bytes:
        """Return the `Facts` of the model, with the state of the engine."""
        (own,) = self._replicas.states()
        state = replace(own, replica=self._name, device=self._node)
        return encode(Facts(self._limits, self._replicas.wait_planned(), self._version, state))

    async def score(self, frame: bytes, model: str, replica: str = "") -> bytes:
        """Return the `Result` or `Failure` of a `Score`, whose deadline is the time that is left.

        Cancelling the call drops work not launched yet.

        Args:
            model: the `fingerprint` of the limits that the request was made for.
            replica: the one that was wanted; `gpuscore.ray.router` reads it.
        """
        try:
            if model != self._model:
                raise Unavailable("the engines change to another model", retry_after=1)
            return encode(Result(0, await self._scored(self._decode(frame))))
        except (GpuscoreError, ProtocolError) as error:
            return encode(Failure.of(0, error))

    async def _scored(self, message: Score) -> ScoreResult:
        request, seconds = check_request(message.request, self._limits), message.request.deadline
        longest = min(self._settings.server.max_queue_seconds, seconds or 0.0)
        refusal = self._replicas.backlog.wait_refusal(request.num_tokens, longest)
        if refusal is not None:  # the wait for all requests sent here would be too long
            raise refusal
        request = structs.replace(request, deadline=monotonic() + (seconds or 0.0))
        (outcome,) = self._replicas.score_all([request])
        if isinstance(outcome, GpuscoreError):
            raise outcome
        return await asyncio.wrap_future(outcome)

    def check_health(self) -> None:
        """Raise EngineFailed once the engine's process cannot be kept running."""
        (engine,) = self._replicas.engines
        if engine.ended.done():
            engine.ended.result()

    async def __del__(self) -> None:
        replicas = getattr(self, "_replicas", None)  # none if the start failed
        if replicas is not None:
            await asyncio.to_thread(replicas.close)
