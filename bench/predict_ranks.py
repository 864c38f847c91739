"""Tables of `predict.py --tensor-parallel`: one request on a model that several cards share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cost_model.cards import Card
from cost_model.judge import quantile
from cost_model.links import LARGE, Link, read_links
from cost_model.prediction import Predictor
from cost_model.shared import SharedForward, on_ranks, why_not
from gpu_work import GOALS
from report import table
from scenarios import QWEN3_32B

SHAPE, NAME = QWEN3_32B, "Qwen3-32B in bfloat16"
GROUP = SHAPE["num_attention_heads"] // SHAPE["num_key_value_heads"]
CHOSEN = [goal for goal in GOALS if goal.name in ("a", "d", "300")]
CHECKED = "nvlink4"  # the link whose tables others' measurements check


def report(
    cards: Mapping[str, Card], predictors: Mapping[str, Predictor], ranks: Sequence[int], label: str
) -> dict[str, Any]:
    """Print the tables; return them for the file.

    Args:
        cards: by key.
        predictors: of the cards that are linked to others.
        ranks: numbers of cards that share the model.
        label: what every title begins with.
    """
    links, counts = read_links(), sorted({1, *ranks})
    found, rows = [], []
    fits = {key: fitting(cards[key], counts) for key in predictors}
    for key, one in predictors.items():
        for goal in CHOSEN:
            link, known = links[cards[key].link], links[CHECKED]
            by_count = [on_ranks(one, link, known, goal, SHAPE, count) for count in counts]
            found += by_count
            rows += total_rows(by_count, goal.workload.num_items, fits[key])
    tables = {
        "published tables of exchanges, and how far they are off others' times": [
            row for link in links.values() for row in error_rows(link)
        ],
        f"{NAME}: does it fit?": [fit_row(cards[key], fits[key]) for key in predictors],
        f"{NAME}: one request alone": rows,
        f"{NAME}: exchanges of a request on h200": [
            row for one in found if one.forward.card == "h200" for row in exchange_rows(one)
        ],
    }
    for title, lines in tables.items():
        print(f"\n{label}: {title}\n\n{table(lines)}")
    kept = [one.to_json() for one in found]
    return {"label": label, "model": NAME, "tables": tables, "predictions": kept}


def fitting(card: Card, counts: Sequence[int]) -> dict[int, str | None]:
    """Return, by number of cards, why gpuscore refuses the model there; None if it fits."""
    return {count: why_not(SHAPE, count, card.memory_mib) for count in counts}


def error_rows(link: Link) -> Iterator[dict[str, Any]]:
    """Yield the link's errors, for large and small exchanges."""
    for name, large in ((f"from {LARGE >> 20} MiB", True), ("smaller", False)):
        errors = link.errors(large)
        yield {
            "link": link.key,
            "exchanges": name,
            "checked": len(errors),
            "median error": f"{quantile(errors, 0.5):.0%}" if errors else "-",
            "90th percentile": f"{quantile(errors, 0.9):.0%}" if errors else f"that of {CHECKED}",
        }


def fit_row(card: Card, fits: Mapping[int, str | None]) -> dict[str, Any]:
    row: dict[str, Any] = {"card": card.key, "memory GiB": round(card.memory_mib / 1024, 1)}
    said = {
        count: "yes" if why is None else f"no: {why.split(';')[0]}" for count, why in fits.items()
    }
    return row | {f"N = {count}": one for count, one in said.items()}


def total_rows(
    found: Sequence[SharedForward], items: int, fits: Mapping[int, str | None]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of cards, beside replicas of the fewest that hold the model."""
    alone = found[0].us
    fewest = next((one for one in found if fits[one.ranks] is None), None)
    for one in found:
        lost = one.lost(alone)
        replicas = one.ranks // fewest.ranks if fewest else 0
        yield {
            "card": one.forward.card,
            "workload": one.forward.workload,
            "N": one.ranks,
            "fits": "yes" if fits[one.ranks] is None else "no",
            "predicted ms": f"{one.us / 1e3:.1f}",
            "interval ms": f"{one.low / 1e3:.1f} to {one.high / 1e3:.1f}",
            "items/s": f"{items / one.us * 1e6:,.0f}",
            "speed-up": f"{alone / one.us:.2f}",
            "in exchange": f"{one.exchange_us / one.us:.0%}",
            **{f"{name} ms": f"{us / 1e3:.1f}" for name, us in lost.items()},
            "in the way": max(lost, key=lambda name: lost[name]) if one.ranks > 1 else "-",
            "as replicas": f"{replicas * items / fewest.us * 1e6:,.0f}" if fewest else "-",
        }


def exchange_rows(one: SharedForward) -> Iterator[dict[str, Any]]:
    for exchange in one.exchanges:
        yield {
            "card": one.forward.card,
            "workload": one.forward.workload,
            "N": one.ranks,
            "exchange": exchange.name,
            "calls": exchange.count,
            "ms": f"{exchange.us / 1e3:.3f}",
            "interval ms": f"{exchange.low / 1e3:.3f} to {exchange.high / 1e3:.3f}",
        }
