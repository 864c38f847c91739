"""`gpuscore bench`: inspect the servers, run the scenarios, print tables and write the bundle."""

import argparse
import os
import secrets
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gpuscore.config import API_KEY_VARIABLE
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError, UsageError
from gpuscore.exits import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL
from gpuscore.measure.bundle import Bundle, write_bundle
from gpuscore.measure.compare import judged
from gpuscore.measure.rates import tables
from gpuscore.measure.report import conclude, facts_of, now
from gpuscore.measure.runner import BenchRun
from gpuscore.measure.scenarios import SCENARIOS, Scenario, text_scenario
from gpuscore.measure.targets import HttpTarget, inspect_server, started
from gpuscore.measure.workload import SENTENCES, TEXT
from gpuscore.system.machine import local_machine, versions


def bench(values: argparse.Namespace, settings: Settings) -> int:
    """Run the command; return 1 if a mode has no figures, and 130 after ^C."""
    scenarios = _scenarios(values)
    if values.bench_seed is None:
        values.bench_seed = secrets.randbelow(2**31)
    facts: dict[str, Any] = {
        "created": now(),
        "minutes": values.minutes,
        "scale": values.scale,
        "seed": values.bench_seed,
        "client": {"machine": local_machine(), "versions": versions()},
    }
    with ExitStack() as stack:
        targets = _targets(values, stack)
        for server in (target.server for target in targets):
            dtype = server.facts.get("model_dtype", "unknown")
            print(f"{server.name}: {server.api}, model {server.model}, {dtype}", flush=True)
        runner = BenchRun(targets, scenarios, values, partial(print, flush=True))
        # The command's own handler would end the process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            runner.run()
        except KeyboardInterrupt:  # what was measured is kept
            facts["interrupted"] = True
    servers = tuple(target.server for target in targets)
    rows = runner.rows()
    print()
    said = {"Run": facts, **{server.name: facts_of(server) for server in servers}}
    conclude(values.report, "gpuscore bench", tables(rows, {}), judged(servers), facts=said)
    if values.bench_output is not None:
        write_bundle(Path(values.bench_output), Bundle(facts, servers, tuple(rows)))
        print(f"wrote {values.bench_output}")
    if "interrupted" in facts:
        return EXIT_SIGNAL + signal.SIGINT
    return EXIT_FAILED if any(row.error is not None for row in rows) else EXIT_OK


def _scenarios(values: argparse.Namespace) -> list[Scenario]:
    names = values.scenario.split(",") if values.scenario else []
    names += [TEXT] if values.bench_input is not None and TEXT not in names else []
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise UsageError(f"--scenario {unknown[0]}: there are {', '.join(SCENARIOS)}")
    path = Path(values.bench_input or SENTENCES)
    return [
        text_scenario(path) if name == TEXT else SCENARIOS[name]
        for name in names or [name for name in SCENARIOS if name not in ("setwise", TEXT)]
    ]


def _targets(values: argparse.Namespace, stack: ExitStack) -> list[HttpTarget]:
    """Start and inspect all servers; the stack ends them."""
    model = values.bench_model
    if model is None and not values.url:
        raise UsageError("nothing to time: give --url or --model")
    if model is None and values.serve:
        raise UsageError("--serve needs --model")
    targets = [
        inspect_server(url, url, _key(values.key_file, number), values)
        for number, url in enumerate(values.url)
    ]
    for options in (values.serve or [""]) if model is not None else ():
        name = " ".join([model.rstrip("/").rpartition("/")[2], *options.split()])
        url = stack.enter_context(started(model, options, values.patience))
        targets.append(inspect_server(name, url, None, values))
    names = [target.server.name for target in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{twice[0]} is given twice")
    return targets


def _key(paths: Sequence[str], number: int) -> str | None:
    if number >= len(paths):
        return os.environ.get(API_KEY_VARIABLE, "").strip() or None
    try:
        lines = Path(paths[number]).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {paths[number]}: {error}") from error
    return lines[0].strip() or None
