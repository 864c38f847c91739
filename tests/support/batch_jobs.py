"""Batch jobs on the fake backend, whose scores an oracle knows."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

import gpuscore
from gpuscore.commands.bulk.command import Progress, run_job
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.config import RequestLimits
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.engine.engine import Engine
from gpuscore.prompts.model import ModelPrompts
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.results import softmax
from support import fake
from support.serving import QUICK

DEMO = Path(gpuscore.__file__).parent / "demo"
LABELS = ("yes", "no")
OUTPUTS = {"jsonl": "jsonl", "csv": "jsonl", "parquet": "parquet"}  # suffixes, by the input's
FIELDS = {"query_column": "query", "labels": "yes,no", "apply_softmax": True}


@cache
def encoder() -> TextEncoder:
    text_encoder = TextEncoder.read(DEMO)
    assert text_encoder is not None
    return text_encoder


@contextmanager
def fake_model(
    around: Callable[[Any], Any] = lambda engine: engine,
    wait_ended: Callable[[], None] = lambda: None,
    limits: RequestLimits | None = None,
    replicas: int = 1,
    **backend: Any,
) -> Iterator[LoadedModel]:
    """Run the fake backend in this process; `around` may put itself before the engine, which may
    pass for several replicas."""
    engine = Engine(fake.FakeBackend(**backend))
    try:
        builder = PromptBuilder(encoder(), engine.limits, limits or RequestLimits())
        prompts = ModelPrompts(builder)
        yield LoadedModel(around(engine), prompts, wait_ended, replicas=replicas)
    finally:
        engine.close()


def served(loading: Callable[[], Any]) -> Callable[[], Any]:
    """Return what loads a model as `loading` does, to be served as "demo"."""

    @contextmanager
    def loaded() -> Iterator[ServedModel]:
        with loading() as model:
            made = ServedModel("demo")
            made.loaded = model
            yield made

    return loaded


class Killed(BaseException):
    """Ends a job in the middle of scoring."""


def stops_after(requests: int) -> Callable[[], Any]:
    """Return what loads a model whose engine lets this many requests through."""

    def around(engine: Any) -> Any:
        left, score_all = [requests], engine.score_all

        def some(values: Sequence[Any]) -> Any:
            left[0] -= len(values)
            if left[0] < 0:
                raise Killed
            return score_all(values)

        engine.score_all = some
        return engine

    return lambda: fake_model(around, max_tokens=16)  # few are in flight


def words(source: Path, output: Path, *flags: str) -> list[str]:
    """Return the command line of a job of the demo model."""
    named = ["--input", str(source), "--output", str(output)]
    return ["batch", "demo", *named, "--labels", "yes,no", *QUICK, *flags]


def run(
    input: Path,
    output: Path,
    loading: Callable[[], Any] = fake_model,
    settings: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[int, int]:
    """Run a job of the columns `query` and `item` in this process; return the numbers of rows in
    its output, and of bad rows."""
    wanted = BatchOptions(str(input), str(output), **(FIELDS | options))
    progress = progress or Progress()
    known = {**wanted.identity(), **(settings or {})}
    run_job(wanted, known, served(loading), progress)
    return progress.rows - progress.bad, progress.bad


def make_rows(count: int, queries: int = 7, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows whose queries come in no order."""
    rng = np.random.default_rng(seed)
    words = ("blue", "red", "wool", "lamp", "chair", "naïve ☃", "steel")
    return [
        {
            "id": number,
            "query": f"query: a {words[q % 7]} {words[(q // 7) % 7]} {q}\nitem: ",
            "item": f"A {words[int(rng.integers(7))]} scarf, {int(rng.integers(1000))}.",
        }
        for number, q in enumerate(rng.integers(0, queries, count).tolist())
    ]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON lines; those that are bytes are lines already."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_input(folder: Path, kind: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format with this suffix."""
    path = folder / f"input.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, rows)
    if kind == "csv":
        return write_csv(path, rows)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def read_output(path: Path) -> list[Any]:
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def expected(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the softmax over the labels [rows, labels] of query + item, prompt by prompt."""
    return _expected(tuple(row["query"] + row["item"] for row in rows))


@cache
def _expected(prompts: tuple[str, ...]) -> Any:
    ids = np.concatenate([*encoder().prompts(LABELS, False)])
    logits = []
    for prompt in encoder().prompts(prompts):
        hashed = fake.token_values(prompt, np.arange(len(prompt))).sum()
        logits.append(fake.logits_of(np.array([hashed] * len(ids)), ids))
    return softmax(np.array(logits, dtype=np.float64).reshape(-1, len(ids)))


def check(rows: Sequence[dict[str, Any]], scores: Any) -> None:
    np.testing.assert_allclose(np.array(scores, dtype=np.float64), expected(rows), rtol=1e-9)
