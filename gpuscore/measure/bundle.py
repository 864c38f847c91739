"""Bundles: what a machine measured, as one JSON file, to compare anywhere.

`gpuscore bench` writes the times, and each server's scores of the sample. `gpuscore parity record`
writes one backend's scores of a workload. Arrays are lists, in which null stands for NaN.

The file contains its own SHA-256, which shows damage and edits. It is not a signature: somebody who
edits the file can compute a new one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.measure.figures import Row
from gpuscore.measure.report import write
from gpuscore.measure.results import CaseResult, Measured, sha256
from gpuscore.measure.workload import Case

FORMAT = "gpuscore bundle 3"
DIGEST = "sha256"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The results of one command.

    Attributes:
        facts: date, options, the client's machine and versions.
        servers: the servers or backends with their scores.
        rows: the times.
    """

    facts: dict[str, Any]
    servers: tuple[Measured, ...]
    rows: tuple[Row, ...] = ()


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle; raise ConfigError if it cannot be written."""
    encoded = msgspec.json.encode(bundle, enc_hook=np.ndarray.tolist)
    content = {"format": FORMAT, **json.loads(encoded)}  # msgspec writes NaN as null
    write(path, json.dumps(content | {DIGEST: _digest(content)}) + "\n", "--output")


def read_bundle(path: Path) -> Bundle:
    """Read a bundle; raise ConfigError with its path if it is missing, changed or invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        if content.pop(DIGEST) != _digest(content):
            raise ConfigError(
                f"{path} was changed after it was written: the SHA-256 in it is another"
            )
        bundle = msgspec.convert(
            _without_nulls(content),
            Bundle,
            dec_hook=lambda _, value: np.array(value, dtype=np.float64),
        )
        for server in bundle.servers:
            for case in server.workload.cases if server.workload is not None else ():
                _check(case, server.results[case.name])
    except OSError as error:
        raise ConfigError(f"{path} is not a bundle: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a bundle of this version: {error}") from error
    return bundle


def _without_nulls(value: Any) -> Any:
    """Remove the nulls from JSON objects: those fields then get their defaults."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


def _check(case: Case, result: CaseResult) -> None:
    shape = (len(case.items), max(map(len, case.label_ids)))
    if result.values.shape != shape:
        raise ValueError(f"the scores of {case.name} are {result.values.shape}, not {shape}")
    if result.mass is not None and (case.apply_softmax or result.mass.shape != shape[:1]):
        raise ValueError(f"the label mass of {case.name} does not fit its items")
