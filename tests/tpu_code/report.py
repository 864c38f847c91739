"""Prints predicted times of the reports' workload, and what stands in the way of the goal."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpu_code.cases import MODELS, Case, arguments_of, batches_of, cases, program_of, traced
from tpu_code.chips import Chip
from tpu_code.facts import measure
from tpu_code.predict import GOAL, NoTrips, Prediction, predict
from tpu_code.rules import GROWTH
from tpu_code.trips import Uncountable, count

PREDICTIONS = Path(__file__).with_name("predictions.json")
QUERY, ITEMS, ITEM = 2000, 500, 20
GOAL_MODEL, GOAL_CHIP = "Qwen3-0.6B", "v6e"
LABEL = "PREDICTED, not measured"
MOST_NAMED = 4  # instructions of a part
SHARE = 0.02  # of the time; smaller parts are not listed


def predicted(model: str, chip: Chip, cache: Path | None) -> Prediction:
    """Predict the time of all batches of 2,000 + 500 x 20.

    Raises:
        NoTrips, Uncountable: it is not known how often a loop runs, or it does not compile.
    """
    whole = Prediction()
    some = next(case for case in cases(MODELS) if (case.model, case.chip) == (model, chip.name))
    for batch in batches_of(some, QUERY, ITEMS, ITEM):
        case = program_of(model, chip.name, batch)
        facts = measure(case, cache)
        if isinstance(facts, str):
            raise NoTrips(facts)
        tally = count(traced(case).jaxpr, arguments_of(case, batch))
        whole.parts += predict(facts.work, tally, chip).parts
    return whole


def print_predictions(chosen: Sequence[Case], cache: Path | None, *, update: bool) -> int:
    """Print the time of each model on each chip of these programs.

    Args:
        chosen: programs.
        cache: of facts.
        update: write the times to predictions.json instead of comparing them with it.

    Returns:
        How many are not known, or have become a tenth longer.
    """
    known = json.loads(PREDICTIONS.read_text()) if PREDICTIONS.is_file() else {}
    failed, asked = 0, {(case.model, case.chip) for case in chosen}
    for model in MODELS:
        for chip in model.chips:
            if (model.name, chip.name) not in asked:
                continue
            name = f"{model.name} on {chip.name}"
            try:
                found = predicted(model.name, chip, cache)
            except (NoTrips, Uncountable) as error:
                print(f"{name}: no prediction: FAILED: {error}")
                failed += 1
                continue
            for line in lines(model.name, chip, found):
                print(line, flush=True)
            if update:
                known[name] = numbers(found)
            elif name not in known:
                print(f"  FAILED: {name} is not in {PREDICTIONS.name}; write it with --update")
                failed += 1
            elif 1000 * found.estimate > known[name]["xla_ms"] * GROWTH:
                print(f"  FAILED: {1000 * found.estimate:.1f} ms, {known[name]['xla_ms']} before")
                failed += 1
    if update:
        PREDICTIONS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return failed


def numbers(found: Prediction) -> dict[str, float]:
    """Return what predictions.json holds of a prediction."""
    return {
        "products_ms": round(1000 * found.products, 1),
        "floor_ms": round(1000 * found.floor, 1),
        "xla_ms": round(1000 * found.estimate, 1),
        "items_per_second": round(ITEMS / found.estimate),
    }


def lines(model: str, chip: Chip, found: Prediction) -> Iterator[str]:
    """Yield the prediction and its parts, the longest first."""
    yield (
        f"{LABEL}: {QUERY:,} + {ITEMS} x {ITEM}, {model} on one {chip.name}: floor "
        f"{1000 * found.floor:.1f} ms, by XLA's cycles {1000 * found.estimate:.1f} ms "
        f"({ITEMS / found.estimate:,.0f} items/s), products alone {1000 * found.products:.1f} ms"
    )
    for part in sorted(found.parts, key=lambda part: -part.estimate):
        if part.estimate > SHARE * found.estimate:
            yield (
                f"  {1000 * part.estimate:8.2f} ms, floor {1000 * part.floor:7.2f}, products "
                f"{1000 * part.products:7.2f}, {part.runs:6} times: {part.name}"
            )
    if (model, chip.name) == (GOAL_MODEL, GOAL_CHIP):
        yield from goal_lines(found)


def goal_lines(found: Prediction) -> Iterator[str]:
    """Yield whether the goal is reached; if not, what stands in the way."""
    rate, allowed = ITEMS / found.estimate, ITEMS / GOAL
    if rate >= GOAL:
        yield f"  goal of {GOAL:,} items/s: reached by this prediction ({rate:,.0f})"
        return
    yield f"  goal of {GOAL:,} items/s, {1000 * allowed:.0f} ms: NOT reached. In the way:"
    for part in sorted(found.parts, key=lambda part: part.products - part.estimate)[:5]:
        yield (
            f"    {part.name}: {1000 * (part.estimate - part.products):.1f} ms more than "
            "its products"
        )
        for name, seconds in part.costly[:MOST_NAMED]:
            yield f"      {1000 * seconds:.1f} ms: {name}"
