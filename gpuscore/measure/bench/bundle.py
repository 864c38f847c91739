"""Bundles of `gpuscore bench`: one JSON file with everything that was measured, and where.

Its SHA-256 is a field of it and reveals damage and edits. It is no signature.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.measure.bench.figures import Row
from gpuscore.measure.bench.sample import Sampled
from gpuscore.measure.bench.targets import About
from gpuscore.measure.parity.results import CaseResult, Run
from gpuscore.measure.parity.workload import Workload
from gpuscore.measure.reports import write

FORMAT, DIGEST = "gpuscore bench bundle 2", "sha256"


@dataclass(frozen=True, slots=True)
class Server:
    """A server of a bundle, with its scores of the sample; a report's has none."""

    about: About
    workload: Workload | None = None
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class BenchBundle:
    """The results of one run, or the figures of a report.

    Attributes:
        facts: date, options, the client's machine and versions; `source` of a report.
    """

    facts: Mapping[str, Any]
    servers: tuple[Server, ...]
    rows: tuple[Row, ...]


def server_of(about: About, sampled: Sampled | None) -> Server:
    """Return a server as a bundle has it; a sample with wrong scores is kept, to be compared."""
    if sampled is None or sampled.first is None:
        return Server(about)
    return Server(about, sampled.workload, sampled.first)


def write_bundle(path: Path, bundle: BenchBundle) -> None:
    """Write a bundle; raise ConfigError if it cannot be written."""
    content = _as_json(bundle)
    write(path, json.dumps(content | {DIGEST: _digest(content)}) + "\n", "--output")


def read_bundle(path: Path) -> BenchBundle:
    """Read a bundle, or a folder of `gpuscore parity record`, which has scores and no times.

    Raises:
        ConfigError: it is missing, changed or invalid; names the file.
    """
    if path.is_dir():
        return _of_parity(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a bundle: {error}") from error
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        digest = content.pop(DIGEST)
        if digest != _digest(content):
            raise ConfigError(
                f"{path} was changed after it was written: its SHA-256 is not the one in it"
            )
        return _from_json(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a bundle of this version: {error}") from error


def _of_parity(directory: Path) -> BenchBundle:
    from gpuscore.measure.parity.bundle import read_bundle as read_folder  # safetensors: not base

    recorded = read_folder(directory)
    facts = {name: recorded.about.get(name) for name in ("hardware", "versions", "created")}
    place = f"{recorded.about.get('device')}, {recorded.run.name}"
    facts |= {"model_dtype": f"{recorded.run.dtype} on {place}"}
    model, rows = str(recorded.about["model_name"]), recorded.workload.vocab_rows
    about = About(directory.name, "score", model, rows, recorded.run.dtype, facts)
    run = replace(recorded.run, name=about.name)
    return BenchBundle({}, (Server(about, recorded.workload, run),), ())


def report_bundles() -> list[BenchBundle]:
    """Return the figures of the reports that the project started from."""
    text = files("gpuscore.measure.bench").joinpath("reports.json").read_text(encoding="utf-8")
    bundles = []
    for report in json.loads(text):
        servers = []
        rows = []
        for server in report["servers"]:
            name = server["name"]
            servers.append(Server(About(name, "score", server["model"], None, server["dtype"])))
            for scenario, way, shape, rate, latencies in server["rows"]:
                notes = (report["source"],)
                requests = rate if scenario == "concurrency" else math.nan
                rates = () if rate is None or scenario == "concurrency" else (rate,)
                rows.append(
                    Row(
                        *(scenario, way, shape, name),
                        rates=rates,
                        rounds=1,
                        requests_per_second=requests,
                        published=tuple(latencies),
                        notes=notes,
                    )
                )
        bundles.append(BenchBundle({"source": report["source"]}, tuple(servers), tuple(rows)))
    return bundles


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(bundle: BenchBundle) -> dict[str, Any]:
    servers = []
    for server in bundle.servers:
        made: dict[str, Any] = {"about": asdict(server.about)}
        if server.workload is not None and server.run is not None:
            made["workload"] = server.workload.as_json()
            made["dtype"] = server.run.dtype
            made["scores"] = {name: r.values.tolist() for name, r in server.run.results.items()}
        servers.append(made)
    rows = [_without_nan(row.as_json()) for row in bundle.rows]
    return {"format": FORMAT, "facts": dict(bundle.facts), "servers": servers, "rows": rows}


def _from_json(content: dict[str, Any]) -> BenchBundle:
    servers = []
    for server in content["servers"]:
        about = About(**server["about"])
        if "workload" not in server:
            servers.append(Server(about))
            continue
        workload = Workload.from_json(server["workload"])
        results = {
            case.name: CaseResult(np.array(server["scores"][case.name], dtype=np.float64), None)
            for case in workload.cases
        }
        servers.append(Server(about, workload, Run(about.name, server["dtype"], results)))
    rows = tuple(Row.from_json(row) for row in content["rows"])
    return BenchBundle(content["facts"], tuple(servers), rows)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
