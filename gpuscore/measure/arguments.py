"""The command lines of `gpuscore bench` and `gpuscore parity`; running one imports its code."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

from gpuscore.config import FileConfig, ModelConfig
from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import EPILOG, CommandParser, add_command, add_flags, refuse_api_key
from gpuscore.config.sources import Settings

# Copies of the keys of tables in other modules, which import NumPy and so are slow to import.
SCENARIOS = (
    *("rerank", "rerank-static", "rerank-short", "concurrency", "poisson", "latency"),
    *("setwise", "text"),
)
APIS = ("score", "generative", "completions")
SIZES = ("text", "quick", "standard", "full", "bench")


def _number(most: float, what: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value <= most or value == float("inf"):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text}")
        return value

    return read


_positive = _number(float("inf"), "a number over 0")


def _rate(text: str) -> str:
    _positive(text.removesuffix("%"))
    return text


# The flag, its metavar, its help, and further keyword arguments of `add_argument`.
Flag: TypeAlias = tuple[str, str | None, str, dict[str, Any]]

_MANY: dict[str, Any] = {"action": "append", "default": []}
_REPORT: Flag = ("--report", "FILE", "also write an HTML page", {})
_TARGETS: tuple[Flag, ...] = (
    ("--url", "URL", "a running server; may be repeated, and servers are measured in turn", _MANY),
    (
        *("--key-file", "FILE"),
        "file with the API key of a --url; repeat it in the order of the URLs; further URLs use "
        "GPUSCORE_API_KEY",
        _MANY,
    ),
    ("--model", "MODEL", "start `gpuscore serve MODEL`, and end it", {"dest": "bench_model"}),
    (
        *("--serve", "OPTIONS"),
        "options of that server, in quotes; repeat it to measure several servers in turn",
        _MANY,
    ),
    ("--api", None, "API to time (default: the first that answers)", {"choices": APIS}),
    ("--served-model", "NAME", "the model's name in requests (default: the first listed)", {}),
    (
        *("--vocab-size", "N"),
        "number of valid token ids (default: as the server says, else 30000)",
        {"type": int},
    ),
)
_SCENARIOS: tuple[Flag, ...] = (
    (
        *("--scenario", "LIST"),
        f"one or more, separated by commas: {', '.join(SCENARIOS)} (default: text with --input, "
        "else all but setwise and text)",
        {},
    ),
    (
        *("--input", "FILE"),
        "scenario text: JSON lines with a query and items (default: real sentences of this "
        "project's documentation)",
        {"dest": "bench_input"},
    ),
    (
        *("--minutes", "N"),
        "total time of all repeats; each scenario runs at least once (default: 5)",
        {"type": _positive, "default": 5.0},
    ),
    (
        *("--scale", "SHARE"),
        "send this share of the requests, for a slower machine; requests keep their length "
        "(default: 1)",
        {"type": _number(1.0, "over 0 and at most 1"), "default": 1.0},
    ),
    (
        *("--rate", "N"),
        "poisson: requests/s, or a share of the server's capacity, such as 70%% (default: 70)",
        {"type": _rate},
    ),
    ("--seconds", "N", "poisson: how long to send requests (default: 120)", {"type": _positive}),
    (
        *("--find-rate", "MS"),
        "poisson: find the highest rate whose 99th percentile of latency is at most this",
        {"type": _positive},
    ),
    (
        *("--bench-seed", "N"),
        "seed of the random tokens (default: a new one, so that nothing is cached)",
        {"type": int},
    ),
    (
        *("--patience", "SECONDS"),
        "how long to wait for an answer before a request counts as lost; raise it for a slow "
        "machine (default: 120)",
        {"type": _positive, "default": 120.0},
    ),
    ("--output", "FILE", "write a result file, for `bench compare`", {"dest": "bench_output"}),
    _REPORT,
)
_ORACLE: Flag = (
    *("--oracle", None),
    "score with transformers in --dtype, for `compare --reference`",
    {"action": "store_true"},
)
_WORKLOAD: tuple[Flag, ...] = (
    (
        *("--workload", None),
        "text: real sentences; bench: the sample of `gpuscore bench`; others: random token ids; "
        "full (2,000 + 500 x 20 tokens) is for a GPU (default: text for a model with a "
        "tokenizer.json, else standard)",
        {"choices": SIZES},
    ),
    ("--seed", "N", "seed of the random tokens (default: 0)", {"type": int, "default": 0}),
)
_COMPARE: tuple[Flag, ...] = (
    (
        *("--reference", "BUNDLE"),
        "bundles of correct scores: a single one, or transformers' in float32 and in each "
        "half-precision dtype, whose errors set the tolerance (default: compare every pair)",
        {"nargs": "+", "default": []},
    ),
    (
        *("--price", "NAME=1.20/h"),
        "what a server costs in an hour; NAME as in the table; may be repeated",
        _MANY,
    ),
    _REPORT,
)


def add_measure(commands: Any) -> None:
    """Add the commands `parity` and `bench`, with their subcommands."""
    parity = commands.add_parser(
        "parity",
        description="Compare ways to score: backends and machines.",
        help="compare backends and machines",
    )
    refuse_api_key(parity)
    subcommands = parity.add_subparsers(required=True, metavar="COMMAND")
    _add_scoring(
        subcommands,
        "run",
        "[MODEL] [OPTIONS]",
        "compare a backend with transformers in float32, on a fixed workload",
        flags=(*_WORKLOAD, _REPORT),
    )
    record = _add_scoring(
        subcommands,
        "record",
        "[MODEL] -o FILE [OPTIONS]",
        "score the workload and write a bundle, to compare on any machine",
        flags=(_ORACLE, *_WORKLOAD),
    )
    record.add_argument("-o", "--output", required=True, metavar="FILE", help="the bundle")
    _add_compare(subcommands, "parity compare")
    bench = _add(
        commands,
        "bench",
        "(--url URL | --model MODEL) [OPTIONS]\n       gpuscore bench compare A [B ...] [OPTIONS]",
        "measure the speed of scoring servers, and compare their scores",
    )
    _add_flags(bench.add_argument_group("What to time"), _TARGETS)
    _add_flags(bench.add_argument_group("How"), _SCENARIOS)
    _add_compare(bench.add_subparsers(metavar="compare", prog="gpuscore bench"), "bench compare")


def _add_scoring(
    commands: Any, name: str, usage: str, help: str, flags: tuple[Flag, ...]
) -> CommandParser:
    """Add a command of parity that scores with a model."""
    command = _add(commands, f"parity {name}", usage, help, epilog=EPILOG)
    _add_flags(command.add_argument_group("The comparison (command line only)"), flags)
    add_flags(command, ModelConfig, FileConfig)
    command.add_help_all()
    return command


def _add_compare(commands: Any, name: str) -> None:
    help = "compare result files: speed, cost and scores"
    compare = _add(commands, name, "A [B ...] [OPTIONS]", help)
    compare.add_argument(
        "bundles", nargs="+", metavar="A", help="bundles; tables show their paths without endings"
    )
    _add_flags(compare, _COMPARE)


def _add_flags(group: Any, flags: tuple[Flag, ...]) -> None:
    for name, metavar, help, keywords in flags:
        group.add_argument(name, help=help, **({"metavar": metavar} if metavar else {}), **keywords)


def _add(commands: Any, name: str, usage: str, help: str, epilog: str = "") -> CommandParser:
    """Add a command. Its module is imported when it runs."""
    modules = {"parity run": "parity.run", "parity record": "parity.record", "bench": "bench.bench"}
    module, _, function = modules.get(name, "compare.compare").partition(".")

    def run(values: argparse.Namespace, settings: Settings) -> int:
        code: int = getattr(import_module(f"gpuscore.measure.{module}"), function)(values, settings)
        return code

    ending = "" if name == "parity record" else "\nExit code 1: scores are wrong."
    text = f"{help[0].upper()}{help[1:]}.{ending}"
    texts = {"description": text, "epilog": EXAMPLES[name] + epilog}
    return add_command(commands, name.split()[-1], f"{name} {usage}", help, run=run, **texts)
