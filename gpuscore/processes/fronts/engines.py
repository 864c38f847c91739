"""The interface of the engines to the parent of the fronts."""

from concurrent.futures import Future
from typing import Protocol

from gpuscore.types.stats import EngineStats


class SupervisedEngine(Protocol):
    """The part of an `EngineClient` that the parent uses."""

    @property
    def planned(self) -> Future[str]: ...
    @property
    def retry_after(self) -> int: ...
    def stats(self) -> EngineStats: ...


class SupervisedReplicas(Protocol):
    """The part of `Replicas` that the parent uses."""

    def wait_ready(self) -> object: ...
    def wait_ended(self) -> None: ...
