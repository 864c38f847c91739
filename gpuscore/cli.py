"""The `gpuscore` command: serve, score, batch, info and parity."""

import argparse
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from gpuscore import __version__
from gpuscore.bulk.arguments import add_batch
from gpuscore.config import (
    CONFIGS,
    EngineConfig,
    FileConfig,
    ModelConfig,
    RequestLimits,
    ServerConfig,
)
from gpuscore.config.flags import EPILOG, HelpFormatter, add_flags, refuse_api_key
from gpuscore.config.options import plain
from gpuscore.config.served import check_one_source, check_single, served_models
from gpuscore.config.sources import DEFAULT, Settings, read_settings
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError, LoadTimeout
from gpuscore.hub import model_directory, model_name
from gpuscore.parity.arguments import add_parity

if TYPE_CHECKING:
    from gpuscore.replicas.placement import Placement

EXIT_OK, EXIT_FAILED, EXIT_ENGINE, EXIT_TEMPORARY, EXIT_CONFIG = 0, 1, 70, 75, 78
LONG_INPUT = 200  # items; with as many or more, a progress bar is shown
SHOWN_CLASSES = 8
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
MAX_WAIT = 1.0  # seconds for a full pipe to be read


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 done, 1 failed, 2 wrong usage, 70 the engine cannot be kept running, 75 the model was not
    ready in time, 78 the model or a setting is not supported; 128 + n: signal n came twice, or the
    drain after it ran out of time.
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
        return EXIT_CONFIG
    except EngineFailed as error:
        _complain(f"{error}{settings.sources(str(error))}")
        return EXIT_TEMPORARY if isinstance(error, LoadTimeout) else EXIT_ENGINE
    except GpuscoreError as error:
        _complain(error.message)
        return EXIT_FAILED


def _complain(message: str) -> None:
    """Write a line to standard error; give up if it takes none within MAX_WAIT seconds."""
    with suppress(OSError):
        if select.select([], [STANDARD_ERROR], [], MAX_WAIT)[1]:
            print(f"gpuscore: {message}", file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuscore",
        allow_abbrev=False,
        description="Score items by the probability of label tokens after query + item.",
    )
    parser.add_argument("--version", action="version", version=f"gpuscore {__version__}")
    refuse_api_key(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = _add_command(commands, "serve", "serve a model over HTTP", _serve)
    add_flags(serve, *CONFIGS, FileConfig)
    score = _add_command(commands, "score", "score the lines of a file", _score, _SCORE_USAGE)
    _add_score_flags(score)
    add_flags(score, ModelConfig, FileConfig)
    add_batch(commands)
    info = _add_command(
        commands, "info", "show a model's architecture, limits and memory, and all settings", _info
    )
    add_flags(info, *CONFIGS, FileConfig)
    add_parity(commands)
    return parser


_SCORE_USAGE = "--query TEXT --items FILE --labels A,B "


def _add_command(
    commands: Any,
    name: str,
    help: str,
    run: Callable[[argparse.Namespace, Settings], int],
    required: str = "",
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,
        usage=f"gpuscore {name} [MODEL] {required}[OPTIONS]",
        description=f"{help[0].upper()}{help[1:]}.",
        help=help,
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    command.set_defaults(command=run)
    refuse_api_key(command)
    return command


def _add_score_flags(score: argparse.ArgumentParser) -> None:
    group = score.add_argument_group("Input and output (command line only)")
    group.add_argument("--query", required=True, metavar="TEXT", help="text that all items share")
    group.add_argument(
        "--items", required=True, metavar="FILE", help="one item per line; - reads standard input"
    )
    group.add_argument(
        "--labels",
        required=True,
        metavar="A,B",
        help="label texts of one token each, or names of a classification model's classes",
    )
    group.add_argument(
        "--full-vocabulary",
        action="store_true",
        help="probabilities over the whole vocabulary, or over all classes, instead of a softmax "
        "over the labels",
    )
    group.add_argument("--item-first", action="store_true", help="prompts are item + query")
    group.add_argument("--json", action="store_true", help="JSON lines in item order")


def _serve(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.serving import serve_model

    check_one_source(settings)
    return serve_model(
        settings.make(ModelConfig),
        settings.make(ServerConfig),
        settings.make(RequestLimits),
        settings.make(EngineConfig),
    )


def _score(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.scorer import Scorer

    check_single(settings)
    items = _read_items(values.items)
    labels = values.labels.split(",")
    with (
        Scorer(settings.make(ModelConfig)) as scorer,
        _progress(len(items)) as report,
    ):
        result = scorer.score(
            values.query,
            items,
            labels=labels,
            apply_softmax=not values.full_vocabulary,
            item_first=values.item_first,
            progress=report,
        )
    show = _print_json if values.json else _print_table
    show(items, labels, result.scores.tolist())
    return EXIT_OK


def _info(values: argparse.Namespace, settings: Settings) -> int:
    from gpuscore.shares_table import shares_table

    engine = settings.make(EngineConfig)
    try:
        check_one_source(settings)
        chosen = served_models(settings.make(ModelConfig), settings.make(ServerConfig))
        if len(chosen) == 1:
            _print_model(chosen[0].config, engine.devices)
        else:
            print(shares_table(chosen, engine))
    finally:  # even if the model cannot be served, because a setting may be the reason
        _print_settings(settings)
    return EXIT_OK


def _print_model(model: ModelConfig, devices: str | None) -> None:
    from gpuscore.backends import plan_backend
    from gpuscore.backends.common.quantization import described
    from gpuscore.backends.common.shapes import count_parameters
    from gpuscore.backends.common.sizing import mebibytes
    from gpuscore.replicas.placement import placements
    from gpuscore.text.tokenizer import TextEncoder

    directory = model_directory(model.model, model.revision)
    places = placements(model, devices)
    os.environ.update(places[0].environment)
    plan = plan_backend(directory, places[0].model)
    config, pages = plan.architecture.config, plan.pages
    num_pages = pages.count(max(0, plan.free_memory() - plan.weight_bytes), 0)
    tokenizer = "tokenizer.json" if TextEncoder.read(directory) else "none: token ids only"
    rows = {
        "model": f"{model_name(model.model)} ({directory})",
        "architecture": config.architecture,
        "head": _head(config.classes),
        "parameters": f"{count_parameters(config):,}",
        "layers, heads, KV heads, head size": f"{config.num_layers}, {config.num_heads}, "
        f"{config.num_kv_heads}, {config.head_dim}",
        "valid token ids": f"0 to {config.vocab_size - 1}",
        "tokenizer": tokenizer,
        "replicas": f"{len(places)}" + ("" if devices is None else f" on {_places(places)}"),
        "device, dtype": f"{plan.device_name}, {plan.dtype_name}",
        "linear layers": described(plan.precision, plan.architecture.storage),
        "longest prompt": f"{plan.max_model_len:,} tokens",
        "one forward pass": f"{plan.max_tokens:,} tokens",
        "memory for weights": mebibytes(plan.weight_bytes),
        "memory for the largest batch": "measured at start",
        "memory for the KV cache": f"{mebibytes(num_pages * pages.page_bytes)} "
        f"({num_pages:,} pages of {pages.size} tokens), less if the largest batch leaves less",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")


def _places(places: "Sequence[Placement]") -> str:
    """Name the replicas' devices; what is printed below them is the first one's."""
    cores = [
        f" (cores {', '.join(map(str, place.cores))})" if place.cores else "" for place in places
    ]
    return ", ".join(place.device + own for place, own in zip(places, cores, strict=True))


def _head(classes: Sequence[str] | None) -> str:
    if classes is None:
        return "the vocabulary: labels are tokens"
    shown = ", ".join(classes[:SHOWN_CLASSES]) + (", ..." if len(classes) > SHOWN_CLASSES else "")
    return f"classification, {len(classes)} class{'es' if len(classes) > 1 else ''}: {shown}"


def _print_settings(settings: Settings) -> None:
    """Print one line per setting; a star marks values that are not defaults."""
    shown = {name: settings.in_force(name) for name in settings.chosen}
    rows = [(name, plain(one.value), one.source) for name, one in shown.items()]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    print(f"\n  {'setting':<{names}}  {'value':<{values}}  source")
    for name, value, source in rows:
        star = " " if source.startswith(DEFAULT) else "*"
        print(f"{star} {name:<{names}}  {value:<{values}}  {source}")


def _read_items(source: str) -> list[str]:
    """Return the lines without their ends; every line is an item, even an empty one."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--items {source}: {error}") from error
    return text.removesuffix("\n").split("\n") if text else []


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal and there are many items."""
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
        print(f"{rank:>4}  " + "  ".join(f"{score:>10.6f}" for score in row) + f"  {item}")
