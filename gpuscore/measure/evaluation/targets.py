"""Targets of an evaluation, each a model in this process or a server, and their answers to all of
the data, kept on disk as they come."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from gpuscore.config import API_KEY_VARIABLE, ModelConfig
from gpuscore.config.options import checked
from gpuscore.errors import ConfigError, GpuscoreError, PromptTooLong, UsageError
from gpuscore.measure.evaluation.data import Labelled, LabelledTexts, Query, Ranked, fingerprint
from gpuscore.measure.progress import Counted
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
        settings = asdict(self)
        del settings["name"]
        return settings


class UnitAnswer(msgspec.Struct, frozen=True):
    """Scores of one unit of the data, and the time that they took: a line of a file of answers.

    Attributes:
        id: of the unit.
        scores: one per document, None for one that was not scored; or a row per text.
        tokens: prompt tokens.
        classes: names of the columns of rows.
        error: the reason why the unit was not scored.
        started: seconds since 1970.
        seconds: until the answer was there.
    """

    id: str
    scores: Sequence[Any]
    tokens: int
    classes: tuple[str, ...] = ()
    error: str | None = None
    started: float = 0.0
    seconds: float = 0.0


Unit: TypeAlias = Query | LabelledTexts
Ask: TypeAlias = Callable[[Unit], UnitAnswer]


_decoder = msgspec.json.Decoder(UnitAnswer)


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
    if target.url is None:
        from gpuscore.offline.scorer import Scorer

        with Scorer(target.config, family=target.family) as scorer:
            scorer.warmup()  # so that the first query's time is no other than the rest's
            yield _asking(scorer, target, GpuscoreError)
        return
    from gpuscore.client import Client, ClientError

    _check_address(target.url)
    with Client(target.url, os.environ.get(API_KEY_VARIABLE)) as client:
        yield _asking(client, target, ClientError)


def _asking(source: Any, target: Target, errors: type[Exception]) -> Ask:
    """Return the function that asks `source`, a `Scorer` or a `Client`, which raises `errors`."""

    def ask(unit: Unit) -> UnitAnswer:
        try:
            return _ask(source, target, unit)
        except errors as error:
            if getattr(error, "code", None) == PromptTooLong.code:
                return _nothing(unit, vars(error)["message"])
            raise UsageError(f"{target.name}: {error}") from error

    return ask


def _check_address(url: str) -> None:
    """Raise UsageError for an address without a host, or with a port that is no number."""
    try:
        parts = urlsplit(url)
        _, host = parts.port, parts.hostname
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    if not host:
        raise UsageError(f"{url}: the address has no host")


def _ask(source: Any, target: Target, unit: Unit) -> UnitAnswer:
    """Ask a `Scorer` or a `Client`, which have the same methods."""
    if isinstance(unit, LabelledTexts):
        labels = None if target.labels is None else list(target.labels)
        classes = source.classify(list(unit.texts), labels=labels)
        rows = classes.probabilities.tolist()
        return UnitAnswer(unit.id, rows, classes.prompt_tokens, tuple(classes.classes))
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
    return UnitAnswer(unit.id, scores, ranking.prompt_tokens)


def _nothing(unit: Unit, why: str) -> UnitAnswer:
    if isinstance(unit, LabelledTexts):  # a text that is not classified has no place in a mean
        raise ConfigError(f"--data {unit.id}: {why}")
    return UnitAnswer(unit.id, [None] * len(unit.documents), 0, error=why)


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A target's answers to all units of the data, by id."""

    name: str
    answers: Mapping[str, UnitAnswer]

    @property
    def seconds(self) -> float:
        """Time in which at least one answer was awaited: pauses between sessions do not count."""
        spans = sorted(
            (answer.started, answer.started + answer.seconds) for answer in self.answers.values()
        )
        total, end = 0.0, float("-inf")
        for start, stop in spans:
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers.values())


def units_of(data: Ranked | Labelled) -> Sequence[Unit]:
    return data.queries if isinstance(data, Ranked) else data.units


def run_target(
    target: Target,
    data: Ranked | Labelled,
    folder: Path,
    concurrency: int,
    scored: Counted,
) -> ScoredRun:
    """Return a target's answers; those that the folder has already are not asked for again.

    Args:
        target: the model or server.
        data: the data.
        folder: of the kept answers.
        concurrency: units that are asked for at a time.
        scored: called with the number of documents or texts of each answer.

    Raises:
        ConfigError: the folder cannot be written, or the target cannot answer.
    """
    path = folder / file_name(target, data)
    known = _read(path)
    units = units_of(data)
    scored(sum(len(unit.texts) for unit in units if unit.id in known))
    missing = [unit for unit in units if unit.id not in known]
    if missing:
        with opened(target) as ask, _appending(path) as file:
            pool = ThreadPoolExecutor(concurrency, thread_name_prefix="eval")
            try:
                waiting = {pool.submit(_timed, ask, unit): unit for unit in missing}
                for done in as_completed(waiting):
                    unit, answer = waiting[done], done.result()
                    known[unit.id] = answer
                    file.write(msgspec.json.encode(answer) + b"\n")
                    file.flush()
                    scored(len(unit.texts))
            finally:  # an error or a signal: what is asked for ends, the rest is not asked
                pool.shutdown(cancel_futures=True)
    return ScoredRun(target.name, {unit.id: known[unit.id] for unit in units})


def _timed(ask: Ask, unit: Unit) -> UnitAnswer:
    started, clock = time.time(), time.perf_counter()
    answer = ask(unit)
    return msgspec.structs.replace(answer, started=started, seconds=time.perf_counter() - clock)


def file_name(target: Target, data: Ranked | Labelled) -> str:
    """Return a name that is different for every setting that the answers depend on."""
    about = [target.settings, fingerprint(data), _files(target)]
    digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", target.name).strip("-")[:60]
    return f"{slug}-{digest}.jsonl"


def _files(target: Target) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of a local model's files, which may be trained anew."""
    folder = Path(target.config.model).expanduser()
    if target.url is not None or not folder.is_dir():
        return []
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _read(path: Path) -> dict[str, UnitAnswer]:
    """Return the kept answers; drop a last line that was cut off, so that others can follow."""
    try:
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        answers = [_decoder.decode(line) for line in whole.splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; --restart removes it") from error
    return {answer.id: answer for answer in answers}


def _appending(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"--output {path.parent}: {error}") from error
