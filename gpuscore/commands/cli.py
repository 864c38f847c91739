"""The `gpuscore` command: serve, batch, info, doctor, parity, bench."""

import argparse
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    add_some_flags,
    refuse_api_key,
)
from gpuscore.config.options import options
from gpuscore.config.sources import Settings, read_settings
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError, LoadTimeout, UsageError
from gpuscore.exits import (
    EXIT_CONFIG,
    EXIT_ENGINE,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_TEMPORARY,
    EXIT_USAGE,
)
from gpuscore.measure.arguments import add_measure
from gpuscore.models.files import printable
from gpuscore.system.extras import remedy
from gpuscore.system.machine import commit

STANDARD_OUTPUT = 1
STANDARD_ERROR = 2
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
    try:
        return command(values, read_settings(vars(values), os.environ))
    except ConfigError as error:
        _complain(str(error))
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_CONFIG
    except EngineFailed as error:
        _complain(str(error))
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
        revision = commit()  # may run git
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
    add_batch(commands, _batch)
    info = _add_command(
        commands, "info", "show a model's architecture, limits and memory, and all settings", _info
    )
    info.add_argument(
        "--device-memory",
        type=_size,
        metavar="BYTES",
        help="plan for a CUDA device with this much free memory, such as 24GiB; the device need "
        "not exist here",
    )
    add_flags(info, *CONFIGS, FileConfig)
    info.add_help_all()
    doctor = _add_command(
        commands,
        "doctor",
        "check whether a server can start on this machine",
        _doctor,
        model="",
    )
    add_some_flags(doctor, "Settings to check", ModelConfig, ("device",))
    names = ("host", "port", "api_key_file", "insecure")
    add_some_flags(doctor, "Address to check", ServerConfig, names)
    add_flags(doctor, FileConfig)
    add_measure(commands)
    return parser


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
    model: str = "[MODEL] ",
) -> CommandParser:
    usage = f"{name} {model}[OPTIONS]"
    description = f"{help[0].upper()}{help[1:]}."
    return add_command(
        commands,
        name,
        usage=usage,
        help=help,
        description=description,
        epilog=EXAMPLES[name] + EPILOG,
        run=run,
    )


def _serve(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.processes.serving import serve_model

    return serve_model(
        settings.make(ModelConfig),
        settings.make(ServerConfig),
        settings.make(RequestLimits),
        settings.make(EngineConfig),
    )


def _info(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.info import print_info

    print_info(settings, values.device_memory)
    return EXIT_OK


def _doctor(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.doctor import doctor

    return doctor(settings)


def _batch(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.commands.bulk.command import batch

    return batch(values, settings)
