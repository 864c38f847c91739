"""The data of an evaluation: queries with graded documents, or labelled texts.

They are read from JSON lines; records of folders are also in Parquet files.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

# A place for errors, such as "line 3", and the record.
Record: TypeAlias = tuple[str, Mapping[str, Any]]
TEXTS_OF_A_UNIT = 64  # texts that are classified by one request


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its candidates.

    Attributes:
        id: unique within the data.
        text: the query.
        documents: ids of the candidates; unique.
        texts: of the candidates.
        first_stage: the candidates' scores by an earlier stage, if known.
        grades: by document id, also of documents that are not candidates; a document with a grade
            over 0 is relevant.
    """

    id: str
    text: str
    documents: tuple[str, ...]
    texts: tuple[str, ...]
    first_stage: tuple[float, ...] | None
    grades: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """A few texts that are classified together, with their right classes.

    Attributes:
        id: unique within the data.
    """

    id: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Data for a ranking.

    Attributes:
        name: of the file or folder.
        queries: those with at least one relevant document.
        left_out: number of queries without a relevant document, for which all rankings are equal.
    """

    name: str
    queries: tuple[Query, ...]
    left_out: int

    @property
    def pairs(self) -> int:
        return sum(len(query.documents) for query in self.queries)


@dataclass(frozen=True, slots=True)
class Labelled:
    """Data for a classification.

    Attributes:
        name: of the file.
        units: all texts.
    """

    name: str
    units: tuple[LabelledTexts, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for unit in self.units for label in unit.labels)


def fingerprint(data: Ranked | Labelled) -> str:
    """Return a digest of everything that scores depend on."""
    digest = sha256()
    for part in data.queries if isinstance(data, Ranked) else data.units:
        fields = [getattr(part, name) for name in part.__slots__]
        digest.update(json.dumps(fields, sort_keys=True).encode())
    return digest.hexdigest()


def ranked(name: str, queries: Sequence[Query]) -> Ranked:
    """Return data without the queries that have no relevant document.

    Raises:
        ConfigError: nothing is left, or an id is there twice.
    """
    _refuse_twice((query.id for query in queries), f"{name}: the query")
    for query in queries:
        _refuse_twice(query.documents, f"{name}: query {query.id}: the document")
    useful = tuple(query for query in queries if any(grade > 0 for grade in query.grades.values()))
    useful = tuple(query for query in useful if query.documents)
    if not useful:
        raise ConfigError(f"--data {name} has no query with candidates and a relevant document")
    return Ranked(name, useful, len(queries) - len(useful))


def read_lines(path: Path) -> Ranked | Labelled:
    """Read JSON lines: objects with query, documents and grades, or with text and label.

    Raises:
        ConfigError: with the line's number, if one of them is not as described.
    """
    rows = list(json_lines(path))
    if not rows:
        raise ConfigError(f"--data {path} has no lines")
    if "label" in rows[0][1]:
        return _labelled(path, rows)
    return ranked(path.name, [_query(path, place, row) for place, row in rows])


def _query(path: Path, place: str, row: Mapping[str, Any]) -> Query:
    def bad(what: str) -> ConfigError:
        return ConfigError(f"--data {path}: {place}: {what}")

    text, documents, grades = row.get("query"), row.get("documents"), row.get("grades")
    if not isinstance(text, str) or not isinstance(documents, list) or not isinstance(grades, list):
        raise bad("needs query (text), documents and grades (lists), or text and label")
    if len(documents) != len(grades):
        raise bad(f"has {len(documents)} documents and {len(grades)} grades")
    if not all(isinstance(grade, int) for grade in grades):
        raise bad("grades must be integers")
    first = row.get("first_stage")
    if first is not None and (len(first) != len(documents) or not all(map(_is_number, first))):
        raise bad("first_stage must be a number for each document")
    named = [
        document if isinstance(document, dict) else {"text": document} for document in documents
    ]
    if not all(isinstance(document.get("text"), str) for document in named):
        raise bad("documents must be texts, or objects with text and perhaps id")
    ids = tuple(str(document.get("id", index)) for index, document in enumerate(named))
    return Query(
        str(row.get("id", place)),
        text,
        ids,
        tuple(document["text"] for document in named),
        None if first is None else tuple(map(float, first)),
        {id: int(grade) for id, grade in zip(ids, grades, strict=True)},
    )


def _labelled(path: Path, rows: Sequence[Record]) -> Labelled:
    texts, labels = [], []
    for place, row in rows:
        text, label = row.get("text"), row.get("label")
        if not isinstance(text, str) or not isinstance(label, str):
            raise ConfigError(f"--data {path}: {place} needs text and label, both texts")
        texts.append(text)
        labels.append(label)
    units = []
    for start in range(0, len(texts), TEXTS_OF_A_UNIT):
        end = min(start + TEXTS_OF_A_UNIT, len(texts))
        name = f"rows {start + 1} to {end}"
        units.append(LabelledTexts(name, tuple(texts[start:end]), tuple(labels[start:end])))
    return Labelled(path.name, tuple(units))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_twice(ids: Iterator[str] | Sequence[str], what: str) -> None:
    twice = [id for id, count in Counter(ids).items() if count > 1]
    if twice:
        raise ConfigError(f"--data {what} {twice[0]} is there twice")


def json_lines(path: Path) -> Iterator[Record]:
    """Yield the object of each line; raise ConfigError for a line that is not an object."""
    for number, line in lines(path):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: line {number} is no JSON object")
        yield f"line {number}", content


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbers and lines that are not empty, without keeping the file in memory."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def records_of(folder: Path, name: str, split: str = "*") -> Iterator[Record]:
    """Yield the records of `name.jsonl`, or of the files in the folder `name` (of one split).

    Raises:
        ConfigError: there are none, or Parquet needs pyarrow.
    """
    paths = files_of(folder, name, split)
    if not paths:
        raise ConfigError(f"--data {folder} has neither {name}.jsonl nor files in {name}/")
    for path in paths:
        yield from _parquet(path) if path.suffix == ".parquet" else json_lines(path)


def files_of(folder: Path, name: str, split: str = "*") -> list[Path]:
    """Return the files of `records_of`; an empty list if they do not exist."""
    if (folder / f"{name}.jsonl").is_file():
        return [folder / f"{name}.jsonl"]
    # As data sets are stored: test.jsonl, or test-00000-of-00001.parquet.
    patterns = [f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"]
    paths = (path for pattern in patterns for path in (folder / name).glob(pattern))
    return sorted(set(paths))


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs pyarrow: {install('batch')}") from error
    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
