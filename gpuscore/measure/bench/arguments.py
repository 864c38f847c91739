"""The command line of `gpuscore bench`; its code is imported when it runs."""

import argparse
from typing import Any

from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import CommandParser, HelpFormatter, refuse_api_key
from gpuscore.config.sources import Settings

# Copies of the keys of SCENARIOS, APIS and SHAPES, whose modules import NumPy and httpx.
SCENARIOS = ("rerank", "rerank-static", "rerank-short", "concurrency", "poisson", "latency", "text")
APIS = ("score", "generative", "completions", "rerank", "tei", "pairs")
SHAPES = ("small", "qwen3-0.6b")


def add_bench(commands: Any) -> None:
    """Add `bench`, and `compare` below it, to the parser's commands."""
    bench: CommandParser = commands.add_parser(
        "bench",
        usage="gpuscore bench (--url URL | --model MODEL) [OPTIONS]\n"
        "       gpuscore bench compare A [B ...] [OPTIONS]",
        description="Time the reports' experiments on running servers, or on a model.",
        help="time any server: items/s, latencies and cost, beside others",
        epilog=EXAMPLES["bench"],
        formatter_class=HelpFormatter,
    )
    bench.set_defaults(command=_bench)
    refuse_api_key(bench)
    _add_targets(bench.add_argument_group("What to time"))
    _add_scenarios(bench.add_argument_group("How"))
    _add_compare(bench.add_subparsers(metavar="compare", prog="gpuscore bench"))


def _add_targets(group: Any) -> None:
    group.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="a running server, such as http://127.0.0.1:8000; may be repeated, and servers are "
        "measured in turn",
    )
    group.add_argument(
        "--key-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file whose first line is the key of the --url at the same place; GPUSCORE_API_KEY is "
        "the key of those without one",
    )
    group.add_argument(
        "--model",
        dest="bench_model",
        metavar="MODEL",
        help="start `gpuscore serve MODEL`, and end it",
    )
    group.add_argument(
        "--serve",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="options of that server, in quotes; if repeated, as many servers are measured in turn",
    )
    group.add_argument(
        "--in-process", action="store_true", help="time Scorer with --model, without HTTP"
    )
    group.add_argument(
        "--shape",
        dest="bench_shape",
        choices=SHAPES,
        help="make a random model of this size in place of --model; needs transformers",
    )
    group.add_argument(
        "--api", choices=APIS, help="API to time (default: the first of these that answers)"
    )
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
    group.add_argument(
        "--scenario",
        default=None,
        metavar="LIST",
        help=f"separated by commas: {', '.join(SCENARIOS)} (default: "
        "all but text, or the scenario of --input)",
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
        type=_positive,
        default=5.0,
        metavar="N",
        help="time for all repeats together; each way is measured at least once (default: 5)",
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
        "--seconds", type=_positive, metavar="N", help="poisson: of arrivals (default: 120)"
    )
    group.add_argument(
        "--find-rate",
        type=_positive,
        metavar="MS",
        help="poisson: search the highest rate whose 99th percentile of latency is at most this",
    )
    group.add_argument(
        "--bench-seed",
        type=int,
        metavar="N",
        help="seed of the random tokens (default: a new one, so that nothing is cached)",
    )
    group.add_argument(
        "--patience",
        type=_positive,
        default=120.0,
        metavar="SECONDS",
        help="without any answer, after which requests count as lost, and the time that a server "
        "started here has for an answer; raise it for a slow machine (default: 120)",
    )
    group.add_argument(
        "--output", dest="bench_output", metavar="FILE", help="write a bundle, to compare anywhere"
    )
    group.add_argument("--report", metavar="FILE", help="also write an HTML page with plots")
    group.add_argument(
        "--allow-dirty",
        action="store_true",
        help="do not mark a server that was built from an uncommitted tree",
    )


def _add_compare(commands: Any) -> None:
    compare: CommandParser = commands.add_parser(
        "compare",
        usage="gpuscore bench compare A [B ...] [OPTIONS]",
        description="Compare bundles of `gpuscore bench --output`: speed, cost and scores.\n"
        "Exit code 1: servers of one model disagree.",
        help="compare bundles",
        epilog=EXAMPLES["bench compare"],
        formatter_class=HelpFormatter,
    )
    compare.set_defaults(command=_compare)
    compare.add_argument(
        "bundles",
        nargs="+",
        metavar="A",
        help="bundles, named by their files, and by folders where files have one name",
    )
    compare.add_argument(
        "--reference", metavar="FILE", help="bundle whose scores count as right (default: A)"
    )
    compare.add_argument(
        "--other-models",
        action="store_true",
        help="compare the times of bundles of different models",
    )
    compare.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=1.20/h",
        help="what a server costs in an hour; NAME as in its bundle; may be repeated",
    )
    compare.add_argument(
        "--reports",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the figures of the reports that the scenarios come from (default: true)",
    )
    compare.add_argument("--format", choices=("text", "markdown", "html"), default="text")
    compare.add_argument("--output", metavar="FILE", help="write it there instead of printing it")


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number over 0, got {text}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be over 0 and at most 1, got {text}")
    return value


def _rate(text: str) -> str:
    _positive(text.removesuffix("%"))
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _bench(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.measure.bench.command import bench

    return bench(values)


def _compare(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.measure.bench.compare import compare

    return compare(values)
