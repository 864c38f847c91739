"""The models of a server: their states, the choice of a request's model, and the requests in
flight (`Backlog`): the limits on them, and the wait at the present rate."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gpuscore.config import EngineConfig, RequestLimits
from gpuscore.config.served import ANY_MODEL, listed
from gpuscore.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from gpuscore.prompts.model import ModelPrompts
from gpuscore.text.tokenizer_info import TokenizerInfo
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreRequest, ScoreResult
from gpuscore.types.stats import ReplicaState

# States of a model.
LOADING = "loading"
READY = "ready"
LOST = "lost"
LOADING_RETRY_AFTER = 5  # seconds
MAX_RETRY_AFTER = 30  # seconds
_SIZES = 48  # sizes are counted by their number of binary digits


class ScoringEngine(Protocol):
    """The part of `Replicas` that the server uses."""

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def alive(self) -> bool: ...

    @property
    def rate(self) -> float:
        """Tokens computed per second in well filled batches; 0 while that is unknown."""

    def score_all(self, requests: list[ScoreRequest]) -> "list[Future[ScoreResult]]": ...

    def states(self) -> list[ReplicaState]: ...

    def close(self) -> None: ...


class Backlog:
    """The requests that were admitted and are not answered yet.

    The event loop calls `admit` when the number of tokens of a request is known. The engine itself
    refuses a request only if it lacks memory for it.

    Args:
        config: the limits on requests, items and tokens in flight.
        rate: returns the tokens computed per second; 0 while that is unknown.

    Attributes:
        requests, items, tokens: how many of each are in flight.
    """

    def __init__(self, config: EngineConfig, rate: Callable[[], float]) -> None:
        self.config = config
        self.requests = self.items = self.tokens = 0
        self._rate = rate
        # Of requests of each size: their number, and their tokens.
        self._counts = [0] * _SIZES
        self._sums = [0] * _SIZES

    @property
    def most_requests(self) -> int:
        return self.config.max_queued_requests

    def admit(self, request: ScoreRequest, seconds: float = math.inf) -> None:
        """Add a request to the backlog. An empty backlog admits any request, whatever its size.

        Raises:
            Overloaded: with this request, the backlog would exceed a limit, or the request would
                wait longer than `seconds`.
        """
        tokens = request.num_tokens
        items = len(request.item_ids)
        config = self.config
        if (late := self.wait_refusal(tokens, seconds)) is not None:
            raise late
        if self.requests:
            if self.requests >= config.max_queued_requests:
                raise self._full("")
            if self.tokens + tokens > config.max_queued_tokens:
                raise self._full(f", the limit is {config.max_queued_tokens} tokens")
            if self.items + items > config.max_queued_items:
                raise self._full(
                    f", with {self.items} items; the limit is {config.max_queued_items} items"
                )
        self._add(1, items, tokens)

    def leave(self, request: ScoreRequest) -> None:
        """Remove a request that was answered, failed or cancelled."""
        self._add(-1, -len(request.item_ids), -request.num_tokens)

    @property
    def retry_after(self) -> int:
        """Whole seconds until the backlog is computed, at the present rate; 1 without a rate."""
        rate = self._rate()
        return whole_seconds(self.tokens / rate) if rate > 0 else 1

    def seconds_ahead(self, tokens: int) -> float:
        """Seconds that a request of `tokens` tokens would wait for others; 0 without a rate.

        The scheduler gives all requests equal numbers of tokens. So before this request is done,
        each other request computes as many tokens as this one, or all of its own if it has fewer.
        Requests of one size are added up before they are compared, so this is an upper bound.
        """
        rate = self._rate()
        if rate <= 0:
            return 0.0
        ahead = (min(s, n * tokens) for n, s in zip(self._counts, self._sums, strict=True))
        return sum(ahead) / rate

    def wait_refusal(self, tokens: int, seconds: float) -> Overloaded | None:
        """Return an error if a request of `tokens` tokens would wait longer than `seconds`."""
        if self.tokens <= seconds * self._rate():  # short enough even if it waits for all of them
            return None
        wait = self.seconds_ahead(tokens)
        if wait <= seconds:
            return None
        return Overloaded(
            f"{self.requests} requests with {self.tokens} tokens are in flight, a wait of about "
            f"{wait:.0f} seconds; the limit is {seconds:.3g}",
            retry_after=whole_seconds(wait - seconds),
        )

    def _full(self, more: str) -> Overloaded:
        return Overloaded(
            f"{self.requests} requests with {self.tokens} tokens are in flight{more}",
            retry_after=self.retry_after,
        )

    def _add(self, sign: int, items: int, tokens: int) -> None:
        size = min(abs(tokens).bit_length(), _SIZES - 1)
        self.requests += sign
        self.items += items
        self.tokens += tokens
        self._counts[size] += sign
        self._sums[size] += tokens


def whole_seconds(seconds: float) -> int:
    """Round to a value for the Retry-After header: 1 to MAX_RETRY_AFTER seconds."""
    return max(1, min(MAX_RETRY_AFTER, round(seconds)))


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
    config: EngineConfig = EngineConfig()  # the limits on its requests in flight
    backlog: Backlog = field(init=False)

    def __post_init__(self) -> None:
        backlog = Backlog(self.config, lambda: self.engine.rate)
        object.__setattr__(self, "backlog", backlog)

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
        self.name = name
        self.names = (name, *others)
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
        return [served.loaded.backlog for served in self._models if served.loaded and served.alive]

    def find(self, name: str | None) -> ServedModel | None:
        """Return the model that `choose` returns; None if it would raise."""
        if name is None or name == ANY_MODEL:
            return self.only
        return self._by_name.get(name)

    def choose(self, name: str | None) -> ServedModel:
        """Return the model with a request's name; None and "default" stand for the only model.

        Raises:
            ModelNotFound: no model has this name.
            InvalidRequest: no name is given, and there are several models.
        """
        served = self.find(name)
        if served is not None:
            return served
        if name is None or name == ANY_MODEL:
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
