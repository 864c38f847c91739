"""Targets of an evaluation: a model in this process, or a server."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from gpuscore.config import API_KEY_VARIABLE, ModelConfig
from gpuscore.config.options import checked
from gpuscore.errors import ConfigError, GpuscoreError, PromptTooLong, UsageError
from gpuscore.measure.evaluation.data import LabelledTexts, Query
from gpuscore.models.hub import model_name

# Settings by which another run may differ from the evaluated one.
CHANGES = ("instruction", "family", "dtype", "quantization", "backend", "attention")


@dataclass(frozen=True, slots=True)
class Target:
    """A model in this process, or a server, with everything that scores depend on.

    Attributes:
        name: as in the report.
        config: the model and its settings; `model` is an address if it is a server's.
        family: the prompt family, of a model in this process.
        instruction: replaces the family's own.
        labels: classes to choose from.
        truncate: documents that are too long are cut.
    """

    name: str
    config: ModelConfig
    family: str = "auto"
    instruction: str | None = None
    labels: tuple[str, ...] | None = None
    truncate: bool = False

    @property
    def url(self) -> str | None:
        return self.config.model if is_url(self.config.model) else None

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the name, for a comparison with an earlier run."""
        found = asdict(self)
        del found["name"]
        return found


@dataclass(frozen=True, slots=True)
class UnitAnswer:
    """Scores of one unit of the data.

    Attributes:
        scores: one per document, None for one that was not scored; or a row per text.
        tokens: prompt tokens.
        classes: names of the columns of rows.
        error: why nothing of the unit was scored.
    """

    scores: Sequence[Any]
    tokens: int
    classes: tuple[str, ...] = ()
    error: str | None = None


Ask: TypeAlias = Callable[[Query | LabelledTexts], UnitAnswer]


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def other(base: Target, text: str) -> Target:
    """Return the target that `--against` names: `setting=value`, a model or an address.

    Raises:
        ConfigError: a setting is not known or its value is not allowed, or a server's cannot be set
            from here.
    """
    setting, equals, value = text.partition("=")
    if not equals or "/" in setting or is_url(text):
        return replace(base, name=model_name_of(text), config=replace(base.config, model=text))
    if setting not in CHANGES:
        raise ConfigError(f"--against {text}: {setting} is none of {', '.join(CHANGES)}")
    name = f"{base.name}, {setting} {value}"
    if setting == "instruction":
        return replace(base, name=name, instruction=value)
    if base.url is not None:
        raise ConfigError(f"--against {text}: a server's {setting} cannot be set from here")
    if setting == "family":
        return replace(base, name=name, family=value)
    changed: dict[str, Any] = {setting: value}
    return replace(base, name=name, config=checked(replace(base.config, **changed)))


def model_name_of(model: str) -> str:
    return model if is_url(model) else model_name(model)


@contextmanager
def opened(target: Target) -> Iterator[Ask]:
    """Load the model, or connect to the server, and yield the function that asks it.

    The function raises UsageError if it gets no scores.
    """
    if target.url is not None:
        from gpuscore.client import Client, ClientError

        _check_address(target.url)
        with Client(target.url, os.environ.get(API_KEY_VARIABLE)) as client:

            def ask_server(unit: Query | LabelledTexts) -> UnitAnswer:
                try:
                    return _ask(client, target, unit)
                except ClientError as error:
                    if getattr(error, "code", None) != PromptTooLong.code:
                        raise UsageError(f"{target.name}: {error}") from error
                    return _nothing(unit, error.message)

            yield ask_server
        return
    from gpuscore.offline.scorer import Scorer

    with Scorer(target.config, family=target.family) as scorer:
        scorer.warmup()  # so that the first query's time is no other than the rest's

        def ask_model(unit: Query | LabelledTexts) -> UnitAnswer:
            try:
                return _ask(scorer, target, unit)
            except PromptTooLong as error:
                return _nothing(unit, error.message)
            except GpuscoreError as error:
                raise UsageError(f"{target.name}: {error.message}") from error

        yield ask_model


def _check_address(url: str) -> None:
    """Raise UsageError for an address without a host, or with a port that is no number."""
    try:
        parts = urlsplit(url)
        _, host = parts.port, parts.hostname
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    if not host:
        raise UsageError(f"{url}: the address has no host")


def _ask(source: Any, target: Target, unit: Query | LabelledTexts) -> UnitAnswer:
    """Ask a `Scorer` or a `Client`, which have the same methods."""
    if isinstance(unit, LabelledTexts):
        labels = None if target.labels is None else list(target.labels)
        found = source.classify(list(unit.texts), labels=labels)
        rows = found.probabilities.tolist()
        return UnitAnswer(rows, found.prompt_tokens, tuple(found.classes))
    ranking = source.rerank(
        unit.text,
        list(unit.texts),
        instruction=target.instruction,
        truncate=target.truncate,
        on_error="null",
    )
    scores: list[float | None] = [None] * len(unit.texts)
    for index, score in zip(ranking.indices.tolist(), ranking.scores.tolist(), strict=True):
        scores[index] = score
    return UnitAnswer(scores, ranking.prompt_tokens)


def _nothing(unit: Query | LabelledTexts, why: str) -> UnitAnswer:
    if isinstance(unit, LabelledTexts):  # a text that is not classified has no place in a mean
        raise ConfigError(f"--data {unit.id}: {why}")
    return UnitAnswer([None] * len(unit.documents), 0, error=why)
