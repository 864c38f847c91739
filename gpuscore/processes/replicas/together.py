"""The replicas of all models of a server, seen as one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from gpuscore.errors import ConfigError, EngineFailed
from gpuscore.processes.replicas.replica import Replica
from gpuscore.processes.replicas.replicas import Replicas


class AllReplicas:
    """The replicas of each model; with one model it adds nothing.

    Args:
        names: of the models.
        models: their replicas.
    """

    def __init__(self, names: Sequence[str], models: Sequence[Replicas]) -> None:
        self.models = models
        self._names = names

    @property
    def engines(self) -> list[Replica]:
        """The engines, model by model."""
        return [engine for model in self.models for engine in model.engines]

    def wait_planned(self, number: int) -> str:
        """Return what will be loaded for a model; raises as `Replicas.wait_planned`."""
        with self.named(number):
            return self.models[number].wait_planned()

    def wait_ready(self) -> None:
        """Block until all models are loaded; raises as `Replicas.wait_ready`, the first error."""
        self._wait([engine.started for engine in self.engines])
        for number, model in enumerate(self.models):
            with self.named(number):
                model.wait_ready()

    def wait_ended(self) -> None:
        """Block until `close`; raise EngineFailed once no engine of any model can be kept running.

        While one model's engine is hopeful, the others are started again however often they fail.
        """
        self._wait([engine.ended for engine in self.engines])

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.models)) as pool:
            for _ in pool.map(lambda model: model.close(), self.models):
                pass

    @contextmanager
    def named(self, number: int) -> Iterator[None]:
        """Begin the errors of one of several models with its name."""
        try:
            yield
        except (ConfigError, EngineFailed) as error:
            if len(self.models) == 1:
                raise
            raise type(error)(f"--model {self._names[number]}: {error}") from error

    def _wait(self, futures: "Sequence[Future[Any]]") -> None:
        """Wait for all engines, or raise the first error, as its model's replicas name it."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        first = 0
        for number, model in enumerate(self.models):
            own = futures[first : first + len(model.engines)]
            first += len(own)
            with self.named(number):
                model.raise_first(own, done)
