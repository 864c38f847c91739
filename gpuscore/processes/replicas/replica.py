"""The interface of one engine to `Replicas`."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from gpuscore.engine.admission import Backlog
from gpuscore.errors import GpuscoreError
from gpuscore.processes.worker.patience import Report
from gpuscore.types.limits import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import EngineStats


class Replica(Protocol):
    """The part of `EngineClient` that is used here."""

    @property
    def planned(self) -> Future[str]: ...

    @property
    def started(self) -> Future[BackendLimits]: ...

    @property
    def ended(self) -> Future[None]: ...

    @property
    def loaded(self) -> tuple[int, int]: ...

    @property
    def alive(self) -> bool: ...

    @property
    def backlog(self) -> Backlog: ...

    @property
    def rate(self) -> float: ...

    @property
    def reported(self) -> Report: ...

    @property
    def retry_after(self) -> int: ...

    def score_all(
        self, requests: Sequence[ScoreRequest]
    ) -> "list[Future[ScoreResult] | GpuscoreError]": ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
