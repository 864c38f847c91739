"""`gpuscore eval`: read the data, score it with each target, measure, report."""

import argparse
from datetime import UTC, datetime
from pathlib import Path

from gpuscore import __version__
from gpuscore.config import ModelConfig, ServerConfig
from gpuscore.config.served import check_single
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.measure.evaluation.data import Labelled, Ranked, read_lines
from gpuscore.measure.evaluation.folders import read_folder
from gpuscore.measure.evaluation.measures import DEFAULT, compared, first_stage, measured, parse
from gpuscore.measure.evaluation.report import (
    Evaluation,
    as_text,
    write_json,
    write_page,
    write_queries,
)
from gpuscore.measure.evaluation.targets import (
    Target,
    file_name,
    model_name_of,
    other,
    run_target,
    units_of,
)
from gpuscore.measure.machine import hardware, hardware_text
from gpuscore.measure.progress import progress

EXIT_OK, EXIT_FAILED = 0, 1
DEMO = Path(__file__).parents[2] / "demo" / "ranking.jsonl"


def evaluate(values: argparse.Namespace, settings: Settings) -> int:
    """Run the command; return 1 if a margin is not held."""
    check_single(settings)
    _check(values)
    measures = parse(values.measures or DEFAULT)
    data = _data(values)
    targets = _targets(values, settings)
    folder = Path(values.output)
    if values.restart:
        for target in targets:
            (folder / file_name(target, data)).unlink(missing_ok=True)
    with progress(len(targets) * sum(len(unit.texts) for unit in units_of(data))) as begin:
        runs = [
            run_target(target, data, folder, values.concurrency, begin(target.name))
            for target in targets
        ]
    measured_runs = [measured(data, run, measures, values.seed) for run in runs]
    before = first_stage(data, measures, values.seed) if isinstance(data, Ranked) else None
    others = [*([before] if before is not None else []), *measured_runs[1:]]
    evaluation = Evaluation(
        data,
        [measured_runs[0], *others],
        [compared(measured_runs[0], other_run, values.seed) for other_run in others],
        _facts(values, data, targets[0]),
        values.price,
        values.margin,
    )
    write_queries(folder / "queries.csv", evaluation)
    write_json(folder / "report.json", evaluation)
    write_page(folder / "report.html", evaluation)
    print(f"{as_text(evaluation)}\n\nwrote {folder / 'report.html'}")
    return EXIT_OK if evaluation.holds else EXIT_FAILED


def _check(values: argparse.Namespace) -> None:
    if values.depth < 1 or values.concurrency < 1:
        raise ConfigError("--depth and --concurrency must be at least 1")
    for name in ("margin", "price"):
        if (value := getattr(values, name)) is not None and value < 0:
            raise ConfigError(f"--{name} must not be negative")


def _data(values: argparse.Namespace) -> Ranked | Labelled:
    path = DEMO if values.data == "demo" else Path(values.data)
    of_folder = {"--qrels": values.qrels, "--run": values.run}
    if path.is_dir():
        paths = [None if place is None else Path(place) for place in of_folder.values()]
        return read_folder(path, values.split, paths[0], paths[1], values.depth)
    if flags := [flag for flag, value in of_folder.items() if value is not None]:
        raise ConfigError(f"{flags[0]} belongs to a folder, and --data {path} is none")
    if not path.exists():
        raise ConfigError(f"--data {path} does not exist")
    data = read_lines(path)
    if values.labels is not None and isinstance(data, Ranked):
        raise ConfigError("--labels belongs to texts with labels, and --data has queries")
    return data


def _targets(values: argparse.Namespace, settings: Settings) -> list[Target]:
    config = settings.make(ModelConfig)
    base = Target(
        model_name_of(config.model),
        config,
        settings.make(ServerConfig).family,
        values.instruction,
        None if values.labels is None else tuple(values.labels.split(",")),
        values.truncate,
    )
    targets = [base, *(other(base, text) for text in values.against)]
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise ConfigError(f"--against names {names[-1]} twice")
    return targets


def _facts(values: argparse.Namespace, data: Ranked | Labelled, target: Target) -> dict[str, str]:
    facts = {"data": f"{values.data} ({data.name})"}
    if isinstance(data, Ranked):
        facts["queries"] = f"{len(data.queries):,} with {data.pairs:,} candidates"
        if data.left_out:
            facts["left out"] = f"{data.left_out:,} queries without a relevant document"
    else:
        facts["texts"] = f"{len(data.labels):,}"
    facts["model"] = target.name
    if target.instruction is not None:
        facts["instruction"] = target.instruction
    if target.url is None:
        config = target.config
        facts["computed"] = (
            f"{config.backend}, --dtype {config.dtype}, --quantization {config.quantization}"
        )
        facts["hardware"] = hardware_text(hardware(config.backend))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return facts | {"date": now, "gpuscore": __version__}
