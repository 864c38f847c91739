"""The engine deployment: each replica has one device, and on it the engine of `gpuscore serve`."""

import asyncio
from dataclasses import dataclass, replace

from ray import serve
from ray.runtime_context import get_runtime_context

from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.errors import GpuscoreError
from gpuscore.models.hub import model_directory
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.worker.wire import Failure, ProtocolError, Result, encode
from gpuscore.ray.messages import Ask, Facts, HostReply, OtherModel, asked, decode, fingerprint
from gpuscore.ray.policy import WAIT
from gpuscore.system.log import chosen_format
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import ReplicaState


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings of a replica; `version` changes with any of them."""

    model: ModelConfig
    engine: EngineConfig
    max_queue_seconds: float
    version: str


class EngineHost:
    """A replica of the engine deployment. The engine's process is supervised and started again as
    `gpuscore serve` does it; Ray replaces the replica if the process cannot be kept running."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: HostSettings
    ) -> None:
        context = serve.get_replica_context()
        self._name, self._node = context.replica_id.unique_id, get_runtime_context().get_node_id()
        self._settings = settings
        self._replicas = await asyncio.to_thread(self._start)
        try:
            self._limits = await asyncio.to_thread(self._replicas.wait_ready)
        except GpuscoreError:
            self._replicas.close()
            raise
        self._model = fingerprint(self._limits)

    def _start(self) -> Replicas:
        settings = self._settings
        directory = model_directory(settings.model.model, settings.model.revision)
        style = chosen_format()
        # No host knows what another one would measure.
        model = settings.model.unmeasured()
        return start_replicas(directory, model, settings.engine, log_format=style)

    async def facts(self, attempt: int = 0) -> bytes:
        """Return the `Facts` of the model, with the state of the engine."""
        about = self._replicas.wait_planned()
        return encode(Facts(self._limits, about, self._settings.version, self._state()))

    async def score(self, frame: bytes, attempt: int = 0) -> bytes:
        """Return the `HostReply` to an `Ask`. Cancelling the call drops work not launched yet."""
        outcome: Result | Failure | OtherModel = OtherModel()
        try:
            message = decode(frame, Ask)
            if message.model == self._model:
                outcome = Result(0, await self._scored(message))
        except (GpuscoreError, ProtocolError) as error:
            outcome = Failure.of(0, error)
        return encode(HostReply(outcome, self._state()))

    async def _scored(self, message: Ask) -> ScoreResult:
        request = asked(message, self._limits)
        refusal = self._refusal(request, message.seconds)
        if refusal is not None:
            raise refusal
        (outcome,) = self._replicas.score_all([request])
        if isinstance(outcome, GpuscoreError):
            raise outcome
        return await asyncio.wrap_future(outcome)

    def _refusal(self, request: ScoreRequest, seconds: float) -> GpuscoreError | None:
        """Return an error if the wait for all requests sent here would be too long."""
        longest = min(self._settings.max_queue_seconds, seconds)
        return self._replicas.backlog.wait_refusal(request.num_tokens, longest)

    def _state(self) -> ReplicaState:
        (own,) = self._replicas.states()
        return replace(own, replica=self._name, device=self._node)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the seconds of queued work, for `ExpectedWait`."""
        stats = self._state().stats
        rate = stats.capacity or stats.tokens_per_second
        return {WAIT: stats.tokens_left / rate if rate > 0 else 0.0}

    def check_health(self) -> None:
        """Raise EngineFailed once the engine's process cannot be kept running."""
        (engine,) = self._replicas.engines
        if engine.ended.done():
            engine.ended.result()

    async def __del__(self) -> None:
        replicas = getattr(self, "_replicas", None)  # none if the start failed
        if replicas is not None:
            await asyncio.to_thread(replicas.close)
