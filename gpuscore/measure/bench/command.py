"""`gpuscore bench`: open the targets, run the scenarios, print tables and write the bundle."""

import argparse
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuscore.config import ModelConfig
from gpuscore.config.flags import CommandParser, add_flags
from gpuscore.config.sources import read_settings
from gpuscore.errors import ConfigError, UsageError
from gpuscore.measure.bench.bundle import BenchBundle, server_of, write_bundle
from gpuscore.measure.bench.compare import agreement, as_text, write_report
from gpuscore.measure.bench.figures import Row
from gpuscore.measure.bench.runner import BenchRun, Options
from gpuscore.measure.bench.scenarios import SCENARIOS, TEXT, Scenario, text_scenario
from gpuscore.measure.bench.targets import Answerer, api_key, in_process, meet, started
from gpuscore.measure.parity.report import now
from gpuscore.system.machine import local_machine, versions

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
SCRATCH = Path("bench-models")  # random models, in the working directory


def bench(values: argparse.Namespace) -> int:
    """Run the command; return 1 if a way has no figures, and 130 after ^C."""
    scenarios = _scenarios(values)
    seed = secrets.randbelow(2**31) if values.bench_seed is None else values.bench_seed
    options = Options(
        values.minutes, values.scale, seed, values.rate, values.seconds, values.find_rate
    )
    with ExitStack() as stack:
        targets = _targets(values, stack)
        for target in targets:
            told = target.about.facts.get("model_dtype", "unknown")
            print(
                f"{target.about.name}: {target.about.api}, model {target.about.model}, {told}",
                flush=True,
            )
        step, say = stack.enter_context(_counter())
        runner = BenchRun(targets, scenarios, options, say, step)
        interrupted = False
        try:
            with _interruptible() as check:
                runner.run(check)
        except KeyboardInterrupt:  # what was measured is kept
            interrupted = True
    facts: dict[str, Any] = {
        "created": now(),
        "minutes": values.minutes,
        "scale": values.scale,
        "seed": seed,
        "client": {"machine": local_machine(), "versions": versions()},
    }
    facts |= {"interrupted": True} if interrupted else {}
    rows = [_marked(row, targets, values.allow_dirty) for row in runner.rows()]
    servers = [server_of(target.about, runner.samples.get(target.about.name)) for target in targets]
    bundle = BenchBundle(facts, tuple(servers), tuple(rows))
    print(as_text(bundle))
    if values.bench_output is not None:
        write_bundle(Path(values.bench_output), bundle)
        print(f"wrote {values.bench_output}")
    if values.report is not None:
        write_report(Path(values.report), bundle, list(agreement([bundle], None)))
        print(f"wrote {values.report}")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(row.error is not None for row in rows) else EXIT_OK


def _scenarios(values: argparse.Namespace) -> list[Scenario]:
    names = values.scenario.split(",") if values.scenario else []
    if unknown := [name for name in names if name not in (*SCENARIOS, TEXT)]:
        raise UsageError(f"--scenario {unknown[0]}: there are {', '.join((*SCENARIOS, TEXT))}")
    scenarios = [SCENARIOS[name] for name in names if name != TEXT]
    if values.bench_input is not None:
        scenarios.append(text_scenario(Path(values.bench_input)))
    elif TEXT in names:
        scenarios.append(text_scenario())
    return scenarios or list(SCENARIOS.values())


def _targets(values: argparse.Namespace, stack: ExitStack) -> list[Answerer]:
    """Start and meet all targets; the stack ends them."""
    model = values.bench_model
    if values.bench_shape is not None:
        if model is not None:
            raise UsageError("--shape makes a model, and --model names one; give one of them")
        from gpuscore.measure.bench.random_models import make_model

        model = str(make_model(values.bench_shape, "bfloat16", SCRATCH))
    if model is None and not values.url:
        raise UsageError("nothing to time: give --url, --model or --shape")
    if model is None and (values.serve or values.in_process):
        raise UsageError("--serve and --in-process need --model or --shape")
    targets: list[Answerer] = []
    asked = values.api, values.served_model, values.vocab_size, values.patience
    for number, url in enumerate(values.url):
        targets.append(meet(url, url, _key(values.key_file, number), *asked))
    for options in (values.serve or [""]) if model is not None else ():
        name = " ".join([model.rstrip("/").rpartition("/")[2], *options.split()])
        if values.in_process:
            target = in_process(f"{name}, in process", _config(model, options))
            targets.append(stack.enter_context(target))
        else:
            url = stack.enter_context(started(model, options, values.patience))
            targets.append(meet(name, url, None, *asked))
    names = [target.about.name for target in targets]
    if len(set(names)) < len(names):
        raise UsageError(f"{names[-1]} is named twice")
    return targets


def _key(paths: Sequence[str], number: int) -> str | None:
    if number >= len(paths):
        return api_key()
    try:
        lines = Path(paths[number]).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {paths[number]}: {error}") from error
    return lines[0].strip() or None


def _config(model: str, options: str) -> ModelConfig:
    """Read the options of `gpuscore serve` that concern the model."""
    parser = CommandParser(prog="gpuscore bench --in-process --serve")
    add_flags(parser, ModelConfig)
    return read_settings(vars(parser.parse_args([model, *options.split()])), {}).make(ModelConfig)


def _marked(row: Row, targets: Sequence[Answerer], allow_dirty: bool) -> Row:
    """Return a row with a note if its server was built from an uncommitted tree."""
    facts = next(target.about.facts for target in targets if target.about.name == row.server)
    commit = str(facts.get("commit", ""))
    if allow_dirty or not commit.endswith("-dirty"):
        return row
    return replace(row, notes=(*row.notes, f"built from an uncommitted tree ({commit})"))


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Let ^C raise KeyboardInterrupt, where the command's own handler would end the process.

    Yields a function that also raises KeyboardInterrupt, once there was a ^C: Python drops an
    exception that is raised while an object is finalised, and garbage is collected before each
    measurement.
    """
    seen = False

    def interrupt(*_: object) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _counter() -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """Yield a function that counts measurements on the terminal's last line, and one that prints a
    line above it. The base install has no tqdm."""
    done, shown = 0, sys.stderr.isatty()

    def clear() -> None:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def step(count: int) -> None:
        nonlocal done
        done += count
        clear()
        if shown:
            print(f"{done} measurements", end="", file=sys.stderr, flush=True)

    def say(line: str) -> None:
        clear()
        print(line, flush=True)

    yield step, say
    clear()
