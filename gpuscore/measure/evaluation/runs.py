"""Runs: the answers of one target to all of the data, kept on disk as they come."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.data import Labelled, LabelledTexts, Query, Ranked, fingerprint
from gpuscore.measure.evaluation.targets import Target, UnitAnswer, opened

Unit = Query | LabelledTexts


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer with the time that it took.

    Attributes:
        answer: the answer.
        started: seconds since 1970.
        seconds: until the answer was there.
    """

    answer: UnitAnswer
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A target's answers to all units of the data, by id."""

    name: str
    answers: Mapping[str, KeptAnswer]

    @property
    def seconds(self) -> float:
        """Time in which at least one answer was awaited: pauses between sessions do not count."""
        spans = sorted((one.started, one.started + one.seconds) for one in self.answers.values())
        total, end = 0.0, float("-inf")
        for start, stop in spans:
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def tokens(self) -> int:
        return sum(one.answer.tokens for one in self.answers.values())


def units_of(data: Ranked | Labelled) -> Sequence[Unit]:
    return data.queries if isinstance(data, Ranked) else data.units


def size_of(unit: Unit) -> int:
    return len(unit.texts)


def run_target(
    target: Target,
    data: Ranked | Labelled,
    folder: Path,
    concurrency: int,
    scored: Callable[[int], None],
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
    scored(sum(size_of(unit) for unit in units if unit.id in known))
    missing = [unit for unit in units if unit.id not in known]
    if missing:
        with opened(target) as ask, _appending(path) as file:
            pool = ThreadPoolExecutor(concurrency, thread_name_prefix="eval")
            try:
                waiting = {pool.submit(_timed, ask, unit): unit for unit in missing}
                for done in as_completed(waiting):
                    unit, kept = waiting[done], done.result()
                    _write(file, unit.id, kept)
                    known[unit.id] = kept
                    scored(size_of(unit))
            finally:  # an error or a signal: what is asked for ends, the rest is not asked
                pool.shutdown(cancel_futures=True)
    return ScoredRun(target.name, {unit.id: known[unit.id] for unit in units})


def _timed(ask: Callable[[Unit], UnitAnswer], unit: Unit) -> KeptAnswer:
    started, clock = time.time(), time.perf_counter()
    answer = ask(unit)
    return KeptAnswer(answer, started, time.perf_counter() - clock)


def file_name(target: Target, data: Ranked | Labelled) -> str:
    """Return a name that changes with everything that the answers depend on."""
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
    return [(name, found.st_size, found.st_mtime_ns) for name, found in stats]


def _read(path: Path) -> dict[str, KeptAnswer]:
    """Return the kept answers; drop a last line that was cut off, so that others can follow."""
    try:
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        return dict(_kept(json.loads(line)) for line in whole.splitlines())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; --restart removes it") from error


def _kept(row: Mapping[str, Any]) -> tuple[str, KeptAnswer]:
    answer = UnitAnswer(row["scores"], row["tokens"], tuple(row["classes"]), row["error"])
    return row["id"], KeptAnswer(answer, row["started"], row["seconds"])


def _write(file: IO[bytes], id: str, kept: KeptAnswer) -> None:
    row = {
        "id": id,
        "scores": kept.answer.scores,
        "tokens": kept.answer.tokens,
        "classes": kept.answer.classes,
        "error": kept.answer.error,
        "started": kept.started,
        "seconds": kept.seconds,
    }
    file.write(json.dumps(row).encode() + b"\n")
    file.flush()


def _appending(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ConfigError(f"--output {path.parent}: {error}") from error
