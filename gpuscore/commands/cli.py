"""The `gpuscore` command: serve, score, batch, info, doctor, parity, bench."""

import argparse
import json
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpuscore import __version__
from gpuscore.commands.bulk.options import add_batch
from gpuscore.config import (
    CONFIGS,
    EngineConfig,
    FileConfig,
    ModelConfig,
    RequestLimits,
    ServerConfig,
)
from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import (
    EPILOG,
    CommandParser,
    HelpFormatter,
    add_command,
    add_flags,
    add_label_flags,
    add_some_flags,
    check_softmax,
    refuse_api_key,
    refuse_pipelines,
    shown_sequences,
)
from gpuscore.config.options import options
from gpuscore.config.served import check_one_source, check_single
from gpuscore.config.sources import Settings, read_settings
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError, LoadTimeout, UsageError
from gpuscore.measure.bench.arguments import add_bench
from gpuscore.measure.parity.arguments import add_parity
from gpuscore.models.files import printable
from gpuscore.system.extras import remedy
from gpuscore.system.machine import commit

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_ENGINE, EXIT_TEMPORARY, EXIT_CONFIG = 70, 75, 78
LEAST_SHOWN = 1e-4  # of scores without an exponent
LONG_INPUT = 200  # items; with as many or more, a progress bar is shown
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
MAX_WAIT = 1.0  # seconds for a full pipe to be read


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 done, 1 failed, 2 wrong usage, which includes a column or a server that is not there, 70 the
    engine cannot be kept running, 75 the model was not ready in time, 78 the model or a setting is
    not supported; 128 + n: signal n came twice, or the drain after it ran out of time.
    """
    values = make_parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    command: Callable[[argparse.Namespace, Settings], int] = values.command
    settings = Settings({})
    try:
        settings = read_settings(vars(values), os.environ)
        return command(values, settings)
    except ConfigError as error:
        _complain(f"{error}{settings.sources(str(error))}")
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_CONFIG
    except EngineFailed as error:
        _complain(f"{error}{settings.sources(str(error))}")
        return EXIT_TEMPORARY if isinstance(error, LoadTimeout) else EXIT_ENGINE
    except GpuscoreError as error:
        _complain(error.message)
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if (needed := remedy(error)) is None:
            raise
        _complain(f"this command needs {needed}")
        return EXIT_CONFIG


def _complain(message: str) -> None:
    """Write a line to standard error; give up if it is not taken within MAX_WAIT seconds."""
    with suppress(OSError):
        if select.select([], [STANDARD_ERROR], [], MAX_WAIT)[1]:
            print(f"gpuscore: {printable(message)}", file=sys.stderr, flush=True)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        revision = commit()  # it may ask git
        print(f"gpuscore {__version__}" + (f" (commit {revision})" if revision else ""))
        parser.exit()


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="gpuscore",
        description="Score items by the probability of label tokens after query + item.",
        epilog=EXAMPLES["gpuscore"],
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show version and commit")
    refuse_api_key(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = _add_command(commands, "serve", "serve a model over HTTP", _serve)
    add_flags(serve, *CONFIGS, FileConfig)
    serve.add_help_all()
    score = _add_command(commands, "score", "score the lines of a file", _score, _SCORE_USAGE)
    _add_score_flags(score)
    add_flags(score, ModelConfig, FileConfig)
    score.add_help_all()
    add_batch(commands, _batch)
    info = _add_command(
        commands, "info", "show a model's architecture, limits and memory, and all settings", _info
    )
    info.add_argument(
        "--device-memory",
        type=_size,
        metavar="BYTES",
        help="plan for a CUDA device with this much free memory, such as 24GiB, which need not be "
        "here",
    )
    add_flags(info, *CONFIGS, FileConfig)
    info.add_help_all()
    doctor = _add_command(
        commands,
        "doctor",
        "check this machine: what would keep a server from starting",
        _doctor,
        model="",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object with all checks")
    add_some_flags(doctor, "Settings to check", ModelConfig, ("device",))
    names = ("host", "port", "api_key_file", "insecure")
    add_some_flags(doctor, "Address to check", ServerConfig, names)
    add_flags(doctor, FileConfig)
    add_parity(commands)
    add_bench(commands)
    return parser


_SCORE_USAGE = "--query TEXT --items FILE --labels A,B "


def _size(text: str) -> int:
    (option,) = (option for option in options(ModelConfig) if option.name == "kv_cache_size")
    value: int = option.from_text(text)
    if problem := option.problem(value):
        raise argparse.ArgumentTypeError(problem)
    return value


def _add_command(
    commands: Any,
    name: str,
    help: str,
    run: Callable[[argparse.Namespace, Settings], int],
    required: str = "",
    model: str = "[MODEL] ",
) -> CommandParser:
    usage, description = f"{name} {model}{required}[OPTIONS]", f"{help[0].upper()}{help[1:]}."
    command = add_command(commands, name, usage, help, description, EXAMPLES[name] + EPILOG, run)
    refuse_pipelines(command)
    return command


def _add_score_flags(score: argparse.ArgumentParser) -> None:
    group = score.add_argument_group("Input and output (command line only)")
    group.add_argument("--query", required=True, metavar="TEXT", help="text that all items share")
    group.add_argument(
        "--items",
        required=True,
        metavar="FILE",
        help="one item per line, which LF or CR LF ends; - reads standard input",
    )
    add_label_flags(group, required=True)
    group.add_argument("--item-first", action="store_true", help="prompts are item + query")
    group.add_argument("--json", action="store_true", help="JSON lines in item order")


def _serve(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.processes.serving import serve_model

    check_one_source(settings)
    return serve_model(
        settings.make(ModelConfig),
        settings.make(ServerConfig),
        settings.make(RequestLimits),
        settings.make(EngineConfig),
    )


def _score(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.offline.scorer import Scorer

    check_single(settings)
    check_softmax(values)
    labels = None if values.labels is None else values.labels.split(",")
    if values.json:
        _refuse_equal(labels or shown_sequences(values.label_sequences).split(","))
    items = _read_items(values.items)
    with (
        Scorer(settings.make(ModelConfig)) as scorer,
        _progress(len(items)) as report,
    ):
        result = scorer.score(
            values.query,
            items,
            labels=labels,
            label_sequences=values.label_sequences,
            label_length_normalization=values.label_length_normalization,
            apply_softmax=values.apply_softmax,
            temperature=values.temperature,
            item_first=values.item_first,
            progress=report,
        )
    show = _print_json if values.json else _print_table
    show(items, [*result.labels], result.scores.tolist())
    return EXIT_OK


def _refuse_equal(labels: list[str]) -> None:
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"--json needs labels that differ, and {label} is there twice")


def _info(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.info import print_info

    print_info(settings, values.device_memory)
    return EXIT_OK


def _doctor(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.doctor import doctor

    return doctor(settings, as_json=values.json)


def _batch(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.bulk.command import batch

    return batch(values, settings)


def _read_items(source: str) -> list[str]:
    """Return the lines without their ends; every line is an item, even an empty one.

    A line ends with LF or CR LF; a lone CR belongs to the item.
    """
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        *lines, last = re.split("\r?\n", content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--items {source}: {error}") from error
    return [*lines, last] if last else lines


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal and there are many items."""
    from tqdm import tqdm  # its import takes half as long as all other imports together

    with tqdm(total=total, unit="item", disable=True if total < LONG_INPUT else None) as bar:
        yield lambda done: bar.update(done - bar.n) and None


def _print_json(items: list[str], labels: list[str], rows: list[list[float]]) -> None:
    for index, (item, row) in enumerate(zip(items, rows, strict=True)):
        scores = dict(zip(labels, row, strict=True))
        print(json.dumps({"index": index, "item": item, "scores": scores}, ensure_ascii=False))


def _print_table(items: list[str], labels: list[str], rows: list[list[float]]) -> None:
    """Print the items as a table, best first by the first label."""
    print("rank  " + "  ".join(f"{label[:10]:>10}" for label in labels) + "  item")
    ranked = sorted(zip(items, rows, strict=True), key=lambda pair: -pair[1][0])
    for rank, (item, row) in enumerate(ranked, start=1):
        print(f"{rank:>4}  " + "  ".join(map(_shown, row)) + f"  {item}")


def _shown(score: float) -> str:
    return f"{score:>10.6f}" if score >= LEAST_SHOWN else f"{score:>10.3e}"
