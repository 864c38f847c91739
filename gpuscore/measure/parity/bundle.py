"""Bundles: a run with its workload and model, as a directory that can be copied to any machine.

    workload.json        every request, in full
    results.safetensors  per case NAME: NAME/values [N, L] natural logs of scores, NAME/mass [N],
                         float64; NaN fills the ends of shorter label lists
    bundle.json          model, backend, flags, versions, hardware
    SHA256SUMS           digests of the three, as sha256sum -c reads them

The digests reveal damage and edits. They are no signature: a forger can write new ones.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from gpuscore.errors import ConfigError
from gpuscore.measure.parity.metrics import Errors
from gpuscore.measure.parity.models import Fingerprint, sha256
from gpuscore.measure.parity.results import CaseResult, Run
from gpuscore.measure.parity.workload import Case, Workload

FORMAT = "gpuscore parity bundle 2"
WORKLOAD, RESULTS, ABOUT, SUMS = "workload.json", "results.safetensors", "bundle.json", "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A run, its workload and its model; `about` has versions, hardware and flags, for people."""

    run: Run
    workload: Workload
    model: Fingerprint
    about: Mapping[str, Any]


def write_bundle(directory: Path, bundle: Bundle) -> None:
    """Write a bundle; raise ConfigError if `directory` exists already or cannot be written."""
    run = bundle.run
    about = {
        **bundle.about,
        "format": FORMAT,
        "run": {
            "name": run.name,
            "dtype": run.dtype,
            "items_per_second": run.items_per_second,
            "alone": run.alone and asdict(run.alone),
            "deterministic": run.deterministic,
            "precision": run.precision,
        },
        "workload_sha256": bundle.workload.digest,
        "model": asdict(bundle.model),
    }
    files = {
        WORKLOAD: bundle.workload.as_json().encode(),
        RESULTS: save(_arrays(run)),
        ABOUT: json.dumps(about, indent=2, ensure_ascii=False).encode() + b"\n",
    }
    files[SUMS] = "".join(f"{sha256(files[name])}  {name}\n" for name in files).encode()
    try:
        directory.mkdir(parents=True)
        for name, content in files.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output {directory}: {error}") from error


def read_bundle(directory: Path) -> Bundle:
    """Read a bundle; raise ConfigError, naming the file, if it is missing, changed or invalid."""
    files = _read(directory)
    try:
        about = json.loads(files[ABOUT])
        if about.get("format") != FORMAT:
            raise ValueError(f"format is {about.get('format')!r}; supported: {FORMAT!r}")
        workload = Workload.from_json(files[WORKLOAD].decode())
        if about["workload_sha256"] != workload.digest:
            raise ValueError(f"its workload_sha256 is not that of {WORKLOAD}")
        arrays = load(files[RESULTS])
        results = {case.name: _result(arrays, case) for case in workload.cases}
        run = about.pop("run")
        alone = run.pop("alone")
        model = Fingerprint(**about.pop("model"))
        return Bundle(
            Run(results=results, alone=alone and Errors(**alone), **run), workload, model, about
        )
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{directory} is not a bundle of this version: {error}") from error


def refuse_different(a: Bundle, b: Bundle) -> None:
    """Raise ConfigError unless both bundles have the same model and the same workload."""
    for part in ("weights", "config", "tokenizer"):
        first, second = getattr(a.model, part), getattr(b.model, part)
        if first != second:
            raise ConfigError(
                f"the bundles are of different models: the SHA-256 of their {part} is "
                f"{_short(first)} and {_short(second)}"
            )
    if a.workload.digest != b.workload.digest:
        raise ConfigError(
            f"the bundles have different workloads: {_named(a.workload)} and {_named(b.workload)}"
        )


def _read(directory: Path) -> dict[str, bytes]:
    """Return the files' contents by name, after comparing each with its digest."""
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        files = {name: (directory / name).read_bytes() for name in (WORKLOAD, RESULTS, ABOUT)}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} is not a bundle: {error}") from error
    for name, content in files.items():
        if sums.get(name) != sha256(content):
            raise ConfigError(
                f"{directory / name} was changed after the bundle was written: its SHA-256 is not "
                f"the one of {SUMS}"
            )
    return files


def _arrays(run: Run) -> dict[str, Any]:
    arrays = {f"{name}/values": result.values for name, result in run.results.items()}
    masses = {f"{name}/mass": r.mass for name, r in run.results.items() if r.mass is not None}
    return {name: np.ascontiguousarray(array) for name, array in (arrays | masses).items()}


def _result(arrays: dict[str, Any], case: Case) -> CaseResult:
    values, mass = arrays[f"{case.name}/values"], arrays.get(f"{case.name}/mass")
    shape = len(case.items), max(map(len, case.label_ids))
    if values.shape != shape or values.dtype != np.float64:
        raise ValueError(f"{case.name}/values is {values.dtype} {values.shape}, not {shape}")
    if (mass is None) != case.apply_softmax or (mass is not None and mass.shape != shape[:1]):
        raise ValueError(f"{case.name}/mass does not belong to its case")
    return CaseResult(values, mass)


def _named(workload: Workload) -> str:
    return (
        f"{workload.named}, {workload.vocab_rows} token ids, "
        f"context {workload.context}, SHA-256 {_short(workload.digest)}"
    )


def _short(digest: str | None) -> str:
    return digest[:16] if digest else "none"
