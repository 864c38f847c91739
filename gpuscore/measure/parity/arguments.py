"""The command line of `gpuscore parity`; the code of its commands is imported when one runs."""

import argparse
from functools import partial
from typing import Any

from gpuscore.config import FileConfig, ModelConfig
from gpuscore.config.examples import EXAMPLES
from gpuscore.config.flags import EPILOG, CommandParser, add_command, add_flags, refuse_api_key
from gpuscore.config.sources import Settings

# Copies of workload.TEXT, the keys of workload.SIZES and workload.SAMPLE, whose module imports
# NumPy and tokenizers.
SIZES = ("text", "quick", "standard", "full", "bench")


def add_parity(commands: Any) -> None:
    """Add `parity` with its commands to the parser's."""
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


def _add_run(commands: Any) -> None:
    run = _add(
        commands,
        "run",
        "[MODEL] --backends LIST [OPTIONS]",
        "compare backends with transformers in float32, on a fixed workload",
        exit_1="a gate failed",
        epilog=EPILOG,
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
        "record",
        "[MODEL] -o DIRECTORY [OPTIONS]",
        "score the workload and write a bundle, to compare on any machine",
        epilog=EPILOG,
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
        "compare",
        "A B [...] [--reference EXACT ROUNDED] [OPTIONS]",
        "compare bundles of one model and one workload",
        exit_1="a gate failed",
    )
    compare.add_argument(
        "bundles",
        nargs="+",
        metavar="A B",
        help="bundles; every pair is judged, and if only one of two is float32, it counts as right",
    )
    compare.add_argument(
        "--reference",
        nargs="+",
        metavar="BUNDLE",
        help="transformers' bundles: one in float32, and one in each half-precision format of the "
        "others. Each bundle is judged by them, as `parity run` judges; no pair is",
    )
    _add_report(compare)


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
    group.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="number of seeds from --seed on, each with requests of its own (default: 1)",
    )


def _add_report(group: Any) -> None:
    group.add_argument("--report", metavar="FILE", help="also write an HTML page with plots")


def _add(
    commands: Any,
    name: str,
    usage: str,
    help: str,
    exit_1: str | None = None,
    epilog: str = "",
) -> CommandParser:
    ending = f"\nExit code 1: {exit_1}." if exit_1 else ""
    description, examples = f"{help[0].upper()}{help[1:]}.{ending}", EXAMPLES[f"parity {name}"]
    run, usage = partial(_run, name), f"parity {name} {usage}"
    return add_command(commands, name, usage, help, description, examples + epilog, run)


def _run(name: str, values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.measure.parity import commands

    runs = {"run": commands.run, "record": commands.record, "compare": commands.compare}
    return runs[name](values, settings)
