"""The command lines of `gpuscore bench` and `gpuscore parity`; their code is imported when it
runs."""

import argparse
from importlib import import_module
from typing import Any

from gpuscore.config import FileConfig, ModelConfig
from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import EPILOG, CommandParser, add_command, add_flags, refuse_api_key
from gpuscore.config.sources import Settings

# Copies of the keys of SCENARIOS, APIS and SIZES, whose modules import NumPy.
SCENARIOS = ("rerank", "rerank-static", "rerank-short", "concurrency", "poisson", "latency", "text")
APIS = ("score", "generative", "completions")
SIZES = ("text", "quick", "standard", "full", "bench")


def add_measure(commands: Any) -> None:
    """Add `parity` and `bench`, with their commands, to the parser's."""
    parity = commands.add_parser(
        "parity",
        description="Compare ways to score: backends and machines.",
        help="compare backends and machines",
    )
    refuse_api_key(parity)
    below = parity.add_subparsers(required=True, metavar="COMMAND")
    _add_run(below)
    _add_record(below)
    _add_compare(below)
    _add_bench(commands)


def _add_run(commands: Any) -> None:
    run = _add(
        commands,
        "parity run",
        "[MODEL] --backends LIST [OPTIONS]",
        "compare backends with transformers in float32, on a fixed workload\n"
        "Exit code 1: a gate failed.",
    )
    group = run.add_argument_group("What to compare (command line only)")
    group.add_argument(
        "--backends",
        required=True,
        metavar="LIST",
        help="comma-separated framework:dtype[:attention][@device], such as "
        "torch:bfloat16:triton,jax:bfloat16@tpu; w8a16 in the place of the dtype is the "
        "--quantization; replaces --backend, --dtype, --attention and --quantization; without "
        "@device a backend gets --device, as transformers does",
    )
    _add_workload(group)
    _add_report(group)
    add_flags(run, ModelConfig, FileConfig)
    run.add_help_all()


def _add_record(commands: Any) -> None:
    record = _add(
        commands,
        "parity record",
        "[MODEL] -o DIRECTORY [OPTIONS]",
        "score the workload and write a bundle, to compare on any machine",
    )
    group = record.add_argument_group("What to record (command line only)")
    group.add_argument(
        "-o", "--output", required=True, metavar="DIRECTORY", help="the bundle; must not exist yet"
    )
    group.add_argument(
        "--oracle",
        action="store_true",
        help="score with transformers in --dtype, for `parity compare --reference`",
    )
    _add_workload(group)
    add_flags(record, ModelConfig, FileConfig)
    record.add_help_all()


def _add_compare(commands: Any) -> None:
    compare = _add(
        commands,
        "parity compare",
        "A B [...] [--reference EXACT ROUNDED] [OPTIONS]",
        "compare the scores of bundles of one model and one workload\nExit code 1: a gate failed.",
    )
    compare.add_argument(
        "bundles",
        nargs="+",
        metavar="A B",
        help="bundles; every pair is judged, and the one in the more exact format counts as right",
    )
    compare.add_argument(
        "--reference",
        nargs="+",
        metavar="BUNDLE",
        help="transformers' bundles: one in float32, and one in each half-precision format of the "
        "others. Each bundle is judged by them, as `parity run` judges; no pair is",
    )
    _add_report(compare)


def _add_bench(commands: Any) -> None:
    bench = _add(
        commands,
        "bench",
        "(--url URL | --model MODEL) [OPTIONS]\n       gpuscore bench compare A [B ...] [OPTIONS]",
        "time the reports' experiments on servers, beside each other",
    )
    _add_targets(bench.add_argument_group("What to time"))
    _add_scenarios(bench.add_argument_group("How"))
    compare = _add(
        bench.add_subparsers(metavar="compare", prog="gpuscore bench"),
        "bench compare",
        "A [B ...] [OPTIONS]",
        "compare bundles of either kind: speed, cost and scores\n"
        "Exit code 1: servers of one model disagree.",
    )
    compare.add_argument("bundles", nargs="+", metavar="A", help="bundles, named by their files")
    compare.add_argument(
        "--reference", metavar="FILE", help="bundle whose scores count as right (default: A)"
    )
    compare.add_argument(
        "--other-models", action="store_true", help="compare the times of different models"
    )
    compare.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=1.20/h",
        help="what a server costs in an hour; NAME as in the table; may be repeated",
    )
    _add_report(compare)


def _add_targets(group: Any) -> None:
    many: dict[str, Any] = {"action": "append", "default": []}
    group.add_argument(
        "--url",
        metavar="URL",
        help="a running server, such as http://127.0.0.1:8000; may be repeated, and servers are "
        "measured in turn",
        **many,
    )
    group.add_argument(
        "--key-file",
        metavar="FILE",
        help="file whose first line is the key of the --url at the same place; GPUSCORE_API_KEY is "
        "the key of those without one",
        **many,
    )
    group.add_argument(
        "--model", dest="bench_model", metavar="MODEL", help="start `gpuscore serve MODEL`"
    )
    group.add_argument(
        "--serve",
        metavar="OPTIONS",
        help="options of that server, in quotes; if repeated, as many servers are measured in turn",
        **many,
    )
    group.add_argument("--api", choices=APIS, help="API to time (default: the first that answers)")
    group.add_argument(
        "--served-model", metavar="NAME", help="the model's name in requests (default: the first)"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of valid token ids (default: as the server says, else 30000)",
    )


def _add_scenarios(group: Any) -> None:
    positive: dict[str, Any] = {"type": _positive}
    group.add_argument(
        "--scenario",
        metavar="LIST",
        help=f"separated by commas: {', '.join(SCENARIOS)} (default: all but text, or the scenario "
        "of --input)",
    )
    group.add_argument(
        "--input",
        dest="bench_input",
        metavar="FILE",
        help="scenario text: JSON lines with a query and items (default: real sentences of this "
        "project's documentation)",
    )
    group.add_argument(
        "--minutes",
        default=5.0,
        metavar="N",
        help="time for all repeats together; each way is measured at least once (default: 5)",
        **positive,
    )
    group.add_argument(
        "--scale",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="share of the requests that are sent, for a slower machine; none is shorter "
        "(default: 1)",
    )
    group.add_argument(
        "--rate",
        type=_rate,
        metavar="N",
        help="poisson: requests/s, or a share of the server's capacity, such as 70%% (default: 70)",
    )
    group.add_argument(
        "--seconds", metavar="N", help="poisson: of arrivals (default: 120)", **positive
    )
    group.add_argument(
        "--find-rate",
        metavar="MS",
        help="poisson: search the highest rate whose 99th percentile of latency is at most this",
        **positive,
    )
    group.add_argument(
        "--bench-seed",
        type=int,
        metavar="N",
        help="seed of the random tokens (default: a new one, so that nothing is cached)",
    )
    group.add_argument(
        "--patience",
        default=120.0,
        metavar="SECONDS",
        help="without any answer, after which requests count as lost, and the time that a server "
        "started here has for an answer; raise it for a slow machine (default: 120)",
        **positive,
    )
    group.add_argument(
        "--output", dest="bench_output", metavar="FILE", help="write a bundle, to compare anywhere"
    )
    _add_report(group)


def _add_workload(group: Any) -> None:
    group.add_argument(
        "--workload",
        choices=SIZES,
        help="text: real sentences; else random token ids by length, full: 2,000 + 500 x 20, for a "
        "GPU; bench: the sample of `gpuscore bench` (default: text for a model with a "
        "tokenizer.json, or standard)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random tokens (default: 0)"
    )


def _add_report(group: Any) -> None:
    group.add_argument("--report", metavar="FILE", help="also write an HTML page")


def _add(commands: Any, name: str, usage: str, description: str) -> CommandParser:
    """Add a command; the first line of its description is also its line in the list of commands."""
    epilog = EXAMPLES[name] + (EPILOG if "[MODEL]" in usage else "")
    short = description.split("\n")[0]
    text = f"{description[0].upper()}{description[1:].replace(short[1:], f'{short[1:]}.')}"
    command = add_command(
        commands, name.split()[-1], f"{name} {usage}", short, text, epilog, _command(name)
    )
    return command


def _command(name: str) -> Any:
    module, function = _RUNS[name]

    def run(values: argparse.Namespace, settings: Settings) -> int:
        code: int = getattr(import_module(f"gpuscore.measure.{module}"), function)(values, settings)
        return code

    return run


_RUNS = {
    "parity run": ("parity", "run"),
    "parity record": ("parity", "record"),
    "parity compare": ("compare", "compare_scores"),
    "bench": ("bench", "bench"),
    "bench compare": ("compare", "compare_times"),
}


def _positive(text: str) -> float:
    return _in_range(text, float("inf"), "a number over 0")


def _share(text: str) -> float:
    return _in_range(text, 1.0, "over 0 and at most 1")


def _rate(text: str) -> str:
    _positive(text.removesuffix("%"))
    return text


def _in_range(text: str, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most or value == float("inf"):
        raise argparse.ArgumentTypeError(f"must be {what}, got {text}")
    return value
