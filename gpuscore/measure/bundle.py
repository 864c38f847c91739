"""Bundles: what a machine measured, to compare anywhere; of two kinds, which are read alike.

`gpuscore bench` writes one JSON file: servers with their scores of the sample, and all times. Its
SHA-256 is a field of it. `gpuscore parity record` writes a folder:

    workload.json        every request, in full
    results.safetensors  per case NAME: NAME/values [N, L] natural logs of scores, NAME/mass [N],
                         float64; NaN fills the ends of shorter label lists
    bundle.json          model, backend, flags, versions, hardware
    SHA256SUMS           digests of the three, as sha256sum -c reads them

The digests reveal damage and edits. They are no signature: a forger can write new ones.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.measure.figures import Row
from gpuscore.measure.pages import write
from gpuscore.measure.results import CaseResult, Errors, Fingerprint, Run, sha256
from gpuscore.measure.workload import Case, Workload

FILE, DIGEST = "gpuscore bench bundle 2", "sha256"
FOLDER = "gpuscore parity bundle 2"
WORKLOAD, RESULTS, ABOUT, SUMS = "workload.json", "results.safetensors", "bundle.json", "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class About:
    """A description of what scores: a server, or a backend in process.

    Attributes:
        name: as in the tables.
        api: name of the API that is timed.
        model: its name.
        vocab: number of valid token ids; None: not told.
        dtype: "float32", another format, or "unknown".
        facts: machine, versions and settings, for people.
    """

    name: str
    api: str
    model: str
    vocab: int | None = None
    dtype: str = "unknown"
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """A server or backend, perhaps with its scores of a workload and its model's digests."""

    about: About
    workload: Workload | None = None
    run: Run | None = None
    model: Fingerprint | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """The results of one command, or the figures of a report.

    Attributes:
        facts: date, options, the client's machine and versions; `source` of a report.
        servers: with their scores.
        rows: times; a folder has none.
    """

    facts: Mapping[str, Any]
    servers: tuple[Measured, ...]
    rows: tuple[Row, ...] = ()


def read_bundle(path: Path) -> Bundle:
    """Read a file or a folder; raise ConfigError, naming it, if it is missing, changed or
    invalid."""
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except OSError as error:
        raise ConfigError(f"{path} is not a bundle: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a bundle of this version: {error}") from error


def write_file(path: Path, bundle: Bundle) -> None:
    """Write a bundle of bench; raise ConfigError if it cannot be written."""
    servers = []
    for server in bundle.servers:
        made: dict[str, Any] = {"about": server.about}
        if server.workload is not None and server.run is not None:
            made["workload"] = server.workload.as_json()
            made["dtype"] = server.run.dtype
            made["scores"] = {name: r.values.tolist() for name, r in server.run.results.items()}
        servers.append(made)
    made = {"format": FILE, "facts": bundle.facts, "servers": servers, "rows": bundle.rows}
    content = json.loads(msgspec.json.encode(made))  # NaN has become null
    write(path, json.dumps(content | {DIGEST: _digest(content)}) + "\n", "--output")


def _read_file(path: Path) -> Bundle:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FILE:
        raise ValueError(f"its format is not {FILE!r}")
    if content.pop(DIGEST) != _digest(content):
        raise ConfigError(
            f"{path} was changed after it was written: its SHA-256 is not the one in it"
        )
    servers = []
    for server in content["servers"]:
        about, workload, run = msgspec.convert(_told(server["about"]), About), None, None
        if "workload" in server:
            workload = Workload.from_json(server["workload"])
            results = {
                case.name: CaseResult(np.array(server["scores"][case.name], np.float64), None)
                for case in workload.cases
            }
            run = Run(about.name, server["dtype"], results)
        servers.append(Measured(about, workload, run))
    rows = msgspec.convert(_told(content["rows"]), tuple[Row, ...])
    return Bundle(content["facts"], tuple(servers), rows)


def _told(value: Any) -> Any:
    """Return JSON without nulls, in whose place the defaults are."""
    if isinstance(value, dict):
        return {name: _told(inner) for name, inner in value.items() if inner is not None}
    return [_told(inner) for inner in value] if isinstance(value, list) else value


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


def write_folder(directory: Path, scored: Measured) -> None:
    """Write a bundle of parity; raise ConfigError if it exists already or cannot be written."""
    from safetensors.numpy import save

    run, workload = scored.run, scored.workload
    assert run is not None and workload is not None and scored.model is not None  # noqa: S101, PT018
    about = {
        **scored.about.facts,
        "model_name": scored.about.model,
        "format": FOLDER,
        "run": {name: value for name, value in asdict(run).items() if name != "results"},
        "workload_sha256": workload.digest,
        "model": asdict(scored.model),
    }
    files = {
        WORKLOAD: workload.as_json().encode(),
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


def _read_folder(directory: Path) -> Bundle:
    from safetensors import SafetensorError  # the base install, which times servers, has it not
    from safetensors.numpy import load

    lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    files = {name: (directory / name).read_bytes() for name in (WORKLOAD, RESULTS, ABOUT)}
    for name, content in files.items():
        if sums.get(name) != sha256(content):
            raise ConfigError(
                f"{directory / name} was changed after the bundle was written: its SHA-256 is not "
                f"the one of {SUMS}"
            )
    facts = json.loads(files[ABOUT])
    if facts.get("format") != FOLDER:
        raise ValueError(f"format is {facts.get('format')!r}; supported: {FOLDER!r}")
    workload = Workload.from_json(files[WORKLOAD].decode())
    if facts.pop("workload_sha256") != workload.digest:
        raise ValueError(f"its workload_sha256 is not that of {WORKLOAD}")
    try:
        arrays = load(files[RESULTS])
    except SafetensorError as error:
        raise ValueError(f"{RESULTS}: {error}") from error
    results = {case.name: _result(arrays, case) for case in workload.cases}
    about = facts.pop("run")
    alone = about.pop("alone")
    about.pop("items_per_second", None)  # of older releases
    run = Run(results=results, alone=alone and Errors(**alone), **about)
    model, name = Fingerprint(**facts.pop("model")), facts.pop("model_name", "unknown")
    described = About(directory.name, "score", name, workload.vocab_rows, run.dtype, facts)
    return Bundle({}, (Measured(described, workload, run, model),))


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


def report_bundles() -> list[Bundle]:
    """Return the figures of the reports that the project started from."""
    bundles = []
    for report in json.loads(Path(__file__).with_name("reports.json").read_text(encoding="utf-8")):
        servers, rows = [], []
        for server in report["servers"]:
            name = server["name"]
            servers.append(Measured(About(name, "score", server["model"], None, server["dtype"])))
            for scenario, way, shape, rate, latencies in server["rows"]:
                loads = scenario == "concurrency"
                rows.append(
                    Row(
                        *(scenario, way, shape, name),
                        rates=() if rate is None or loads else (rate,),
                        rounds=1,
                        requests_per_second=rate if loads else math.nan,
                        published=tuple(latencies),
                        notes=(report["source"],),
                    )
                )
        bundles.append(Bundle({"source": report["source"]}, tuple(servers), tuple(rows)))
    return bundles
