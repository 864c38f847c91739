"""Records of files: JSON lines, and the Parquet files of data sets that were downloaded."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore.errors import ConfigError

# A place for errors, such as "line 3", and the record.
Record: TypeAlias = tuple[str, Mapping[str, Any]]


def json_lines(path: Path) -> Iterator[Record]:
    """Yield the object of each line; raise ConfigError for one that is none."""
    for number, line in lines(path):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: line {number} is no JSON object")
        yield f"line {number}", found


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
    """Return the files of `records_of`; none if there are none."""
    if (folder / f"{name}.jsonl").is_file():
        return [folder / f"{name}.jsonl"]
    # As data sets are stored: test.jsonl, or test-00000-of-00001.parquet.
    patterns = [f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"]
    found = (path for pattern in patterns for path in (folder / name).glob(pattern))
    return sorted(set(found))


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install 'gpuscore[batch]'") from error
    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
