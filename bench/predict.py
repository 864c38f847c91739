"""Predicts the time of forward passes on cards that are not at hand.

Everything that it prints is a prediction: of a model that was calibrated with one half of published
measurements, with the error that it has on the other half. `bench/README.md` says how to read it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import predict_ranks
from cost_model.cards import Card, read_cards
from cost_model.cycles import iteration, parts
from cost_model.judge import LIMIT, Errors, Refused, judge
from cost_model.model import Model
from cost_model.ours import Code, described, shipped_arch, variant_of
from cost_model.prediction import Forward, Predictor
from cost_model.published import halves, read_published
from cost_model.search import candidates, choose
from gpu_work import GOALS
from report import RESULTS, commit, now, table
from scenarios import QWEN3_06B

from gpuscore_kernels.extend_attention import TileConfig
from gpuscore_kernels.extend_attention.config import config_of
from kernel_code.check import CACHE
from kernel_code.compiled import facts_of, triton_version
from kernel_code.facts import CodeFacts

LABEL = "PREDICTED, not measured"
PREDICTED = [goal for goal in GOALS if goal.share is not None]
SHAPE = QWEN3_06B
GROUP = SHAPE["num_attention_heads"] // SHAPE["num_key_value_heads"]
DIM, HALF = SHAPE["head_dim"], 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search", action="store_true", help="choose attention's configuration")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        nargs="+",
        choices=(2, 4, 8),
        help="instead, one request to a model that so many cards share",
    )
    parser.add_argument("--out", type=Path, help="default: a file in bench/results")
    options = parser.parse_args()
    cards, measurements = read_cards(), read_published()
    calibration, held_out = halves(measurements)
    model, errors = judge(measurements, cards)
    print(f"{LABEL}: a model with {model.num_parameters} fitted parameters, ", end="")
    print(f"{len(calibration)} measurements to fit them and {len(held_out)} held out.\n")
    print(table(error_rows(errors)))
    if options.tensor_parallel:
        share(cards, model, errors, options)
        return
    predictors = {
        key: predictor(card, model, errors) for key, card in cards.items() if card.predicted
    }
    found = [one.forward(goal, SHAPE) for one in predictors.values() for goal in PREDICTED]
    title = "Qwen3-0.6B in bfloat16, all batches of a request"
    print(f"\n{LABEL}: {title}; code of Triton {triton_version()}\n")
    print(table([total_row(one) for one in found]))
    for one in found:
        print(f"\n{LABEL}: {one.workload} on {cards[one.card].name}\n")
        print(table(kernel_rows(one)))
    rows = [attention_row(cards[key], one) for key, one in predictors.items()]
    print(f"\n{LABEL}: attention as shipped, all layers of a\n")
    print(table(rows))
    cycles = [row for one in predictors.values() for row in cycle_rows(one)]
    print(f"\n{LABEL}: cycles of a block's tile of keys in attention, as shipped\n")
    print(table(cycles))
    choices = {key: choice(one, options.search) for key, one in predictors.items()}
    for key, said in choices.items():
        print(f"\nConfiguration of extend_attention on {cards[key].name}: {said}")
    line = json.dumps(
        {"date": now(), "commit": commit(), "label": LABEL, "triton": triton_version()}
        | {"model": about(model), "errors": error_rows(errors)}
        | {"predictions": [one.to_json() for one in found]}
        | {"configurations": rows, "cycles": cycles, "choices": choices}
    )
    write(line, options.out or RESULTS / "predictions.jsonl")


def share(
    cards: Mapping[str, Card],
    model: Model,
    errors: Mapping[str, Errors],
    options: argparse.Namespace,
) -> None:
    """Print and keep the predictions for `--tensor-parallel`."""
    predictors = {
        key: predictor(card, model, errors, group=predict_ranks.GROUP)
        for key, card in cards.items()
        if card.predicted and card.link
    }
    found = predict_ranks.report(cards, predictors, options.tensor_parallel, LABEL)
    about_it = {"date": now(), "commit": commit(), "triton": triton_version()}
    write(json.dumps(about_it | found), options.out or RESULTS / "predictions-ranks.jsonl")


def write(line: str, path: Path) -> None:
    path.write_text(line + "\n", encoding="utf-8")
    print(f"\n{path}: one line of JSON")


def predictor(
    card: Card,
    model: Model,
    errors: Mapping[str, Errors],
    config: TileConfig | None = None,
    group: int = GROUP,
) -> Predictor:
    """Return the predictor with a configuration of attention, or with the shipped one.

    Args:
        card: to predict for.
        model, errors: of the cost model.
        config: of attention.
        group: query heads of a KV head.
    """
    config = config or config_of(card.arch, DIM, HALF)
    code = Code.of(facts_for(card, config, group))
    return Predictor(model, errors, card, code, config.shape(group))


def facts_for(card: Card, config: TileConfig, group: int = GROUP) -> CodeFacts:
    """Compile a configuration, or find its facts among those that were compiled before."""
    arch = shipped_arch(card)
    return facts_of(variant_of(arch, group, DIM, config), arch, CACHE)


def attention_row(card: Card, one: Predictor) -> dict[str, Any]:
    """Return attention's time at (a) with the shipped configuration."""
    found = one.forward(GOALS[0], SHAPE)
    us, low, high = found.attention_us()
    rate, least, most = found.attention_rates()
    return {
        "card": card.key,
        "configuration": described(config_of(card.arch, DIM, HALF)),
        "predicted ms": f"{us / 1e3:.1f}",
        "interval ms": f"{low / 1e3:.1f} to {high / 1e3:.1f}",
        "TFLOP/s": f"{rate:.0f} ({least:.0f} to {most:.0f})",
    }


def cycle_rows(one: Predictor) -> Iterator[dict[str, Any]]:
    """Yield how long each part of a multiprocessor is busy with one tile, for each loop."""
    card, overlap = one.card, one.model.overlap[one.card.tensor_cores]
    for name, loop in zip(("pool", "packed", "masked"), one.code.loops, strict=True):
        busy = parts(loop, card, overlap)
        yield (
            {"card": card.key, "loop": name}
            | {part: round(getattr(busy, part)) for part in busy.__slots__}
            | {"waits": loop.trips, "all": round(iteration(loop, card, overlap))}
        )


def choice(one: Predictor, search: bool) -> str:
    """Return the chosen configuration of attention for (a), or why there is none."""
    card, goal = one.card, GOALS[0]
    errors = one.errors[f"attention {card.tensor_cores}"]

    def predicted(config: TileConfig, _: CodeFacts) -> float:
        return predictor(card, one.model, one.errors, config).forward(goal, SHAPE).attention_us()[0]

    shipped = config_of(card.arch, DIM, HALF)
    configs = list(candidates(shipped)) if search else [shipped]
    try:
        ranked = choose(configs, partial(facts_for, card), predicted, errors, card)
    except Refused as refused:
        return f"no choice. {refused}"
    times = [f"{us / 1e3:.3f} ms with {described(config)}" for us, config in ranked]
    return f"{LABEL}: {'; '.join(times)}"


def error_rows(errors: Mapping[str, Errors]) -> list[dict[str, Any]]:
    """Errors on the held-out half, by group of kernels."""
    return [
        {
            "kernels": one.group,
            "held out": one.count,
            "median error": f"{one.median:.0%}",
            "90th percentile": f"{one.ninetieth:.0%}",
            "on unseen series": "-" if one.transfer != one.transfer else f"{one.transfer:.0%}",
            "may choose": "no" if one.worst > LIMIT else "where measured",
        }
        for one in errors.values()
    ]


def total_row(one: Forward) -> dict[str, Any]:
    rate, least, most = one.attention_rates()
    return {
        "card": one.card,
        "workload": one.workload,
        "predicted ms": f"{one.us / 1e3:.1f}",
        "interval ms": f"{one.low / 1e3:.1f} to {one.high / 1e3:.1f}",
        "floor ms": f"{one.floor_us / 1e3:.1f}",
        "of the floor": f"{one.floor_us / one.us:.0%}",
        "its interval": f"{one.floor_us / one.high:.0%} to {one.floor_us / one.low:.0%}",
        "attention TFLOP/s": f"{rate:.0f} ({least:.0f} to {most:.0f})",
        "in short kernels": f"{one.short:.0%}",
    }


def kernel_rows(one: Forward) -> list[dict[str, Any]]:
    """Kernels of a forward pass, and all of them."""
    rows = [
        (kernel.name, kernel.count, kernel.us, kernel.low, kernel.high, kernel.bound)
        for kernel in one.kernels
    ]
    count = sum(kernel.count for kernel in one.kernels)
    return [
        {
            "kernel": name,
            "launches": launched,
            "predicted ms": f"{us / 1e3:.3f}",
            "interval ms": f"{low / 1e3:.3f} to {high / 1e3:.3f}",
            "bound": bound,
        }
        for name, launched, us, low, high, bound in [
            *rows,
            ("all", count, one.us, one.low, one.high, ""),
        ]
    ]


def about(model: Model) -> dict[str, Any]:
    """Parameters of the model."""
    return {
        "parameters": model.num_parameters,
        "share of the boost clock": {key: round(one, 3) for key, one in model.speed.items()},
        "cycles of a product's tile outside its loop": round(model.overhead),
        "share of the memory's bandwidth": round(model.memory, 3),
        "overlap": {
            kind: {name: round(getattr(one, name), 3) for name in one.__slots__}
            for kind, one in model.overlap.items()
        },
    }


if __name__ == "__main__":
    main()
