"""The models of a server: their states, and the choice of a request's model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gpuscore.config import RequestLimits
from gpuscore.config.served import ANY_MODEL, listed
from gpuscore.engine.admission import Backlog
from gpuscore.errors import InvalidRequest, ModelNotFound, Unavailable
from gpuscore.prompts.model import ModelPrompts
from gpuscore.text.tokenizer_info import TokenizerInfo
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import ReplicaState

LOADING, READY, LOST = "loading", "ready", "lost"  # states of a model
LOADING_RETRY_AFTER = 5  # seconds


class ScoringEngine(Protocol):
    """The part of `Replicas` that the server uses."""

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def alive(self) -> bool: ...

    @property
    def backlog(self) -> Backlog: ...

    def score_all(self, requests: list[ScoreRequest]) -> "list[Future[ScoreResult]]": ...

    def states(self) -> list[ReplicaState]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is loaded and warm, with its engine and its prompts.

    `wait_ended` blocks until the engine is closed; it raises if the engine has failed for good.
    """

    engine: ScoringEngine
    prompts: ModelPrompts
    wait_ended: Callable[[], None] = lambda: None
    about: str = ""  # number format and device, for people
    tokenizer_info: TokenizerInfo | None = None  # None: the model has no tokenizer
    replicas: int = 1  # engines that share the work
    settings: Mapping[str, Any] = field(default_factory=dict)  # of model and engine, no defaults

    @property
    def default_labels(self) -> list[int] | None:
        """The labels that /v1/score uses if a body names no labels; None if it must name some."""
        if self.prompts.family is not None:
            return self.prompts.family.label_ids
        classes = self.engine.limits.classes
        return None if classes is None else list(range(len(classes)))


class ServedModel:
    """One model of a server, from before it is loaded.

    Args:
        name: the name that the server shows.
        others: further names by which requests may call it.
    """

    def __init__(self, name: str, others: tuple[str, ...] = ()) -> None:
        self.name, self.names = name, (name, *others)
        self.loaded: LoadedModel | None = None

    @property
    def alive(self) -> bool:
        return self.loaded is not None and self.loaded.engine.alive

    @property
    def state(self) -> str:
        """LOADING, READY or LOST."""
        if self.loaded is None:
            return LOADING
        return READY if self.alive else LOST

    def ready(self) -> LoadedModel:
        """Return the loaded model; raise Unavailable while it loads or has no running engine."""
        if self.loaded is None:
            raise Unavailable("the model is loading", retry_after=LOADING_RETRY_AFTER)
        if not self.alive:  # before any work on its text
            raise Unavailable("the engine is not running", retry_after=LOADING_RETRY_AFTER)
        return self.loaded


class ModelTable:
    """The models of a server, by the names that requests may use; at least one."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {name: served for served in reversed(models) for name in served.names}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def only(self) -> ServedModel | None:
        """The model of a server that has one."""
        return self._models[0] if len(self._models) == 1 else None

    @property
    def limits(self) -> RequestLimits | None:
        """The limits of a request, which all models share; None until one is loaded."""
        loaded = (served.loaded for served in self._models if served.loaded is not None)
        return next((model.prompts.builder.limits for model in loaded), None)

    @property
    def names(self) -> list[str]:
        return [served.name for served in self._models]

    @property
    def backlogs(self) -> list[Backlog]:
        """The backlogs of the models that can score now."""
        return [
            served.loaded.engine.backlog
            for served in self._models
            if served.loaded and served.alive
        ]

    def find(self, wanted: str | None) -> ServedModel | None:
        """Return the model that `choose` returns; None if it would raise."""
        if wanted is None or wanted == ANY_MODEL:
            return self.only
        return self._by_name.get(wanted)

    def choose(self, wanted: str | None) -> ServedModel:
        """Return the model with a request's name; None and "default" stand for the only model.

        Raises:
            ModelNotFound: no model has this name.
            InvalidRequest: no name is given, and there are several models.
        """
        served = self.find(wanted)
        if served is not None:
            return served
        if wanted is None or wanted == ANY_MODEL:
            raise InvalidRequest(f"model is required: one of {listed(self.names)}", param="model")
        if self.only is not None:
            raise ModelNotFound(f"this server has one model: {self.only.name}", param="model")
        raise ModelNotFound(f"this server has the models {listed(self.names)}", param="model")

    def states(self) -> list[ReplicaState]:
        """Return the states of all engines of the loaded models."""
        return [
            replace(state, model=served.name)
            for served in self._models
            if served.loaded is not None
            for state in served.loaded.engine.states()
        ]
