"""The rules by which a day with a card decides, and the goals that its figures are held against.

`bench/README.md` says where the rules come from.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from report import Row, short

Stages = Mapping[str, Mapping[str, Any]]
Value = Callable[[Stages], float]


@dataclass(frozen=True)
class Rule:
    """One figure of the day, and what follows from it.

    Args:
        figure: what it is, with its unit.
        value: finds it in the findings of all stages; raises LookupError if it is not there.
        rule: in words.
        verdict: of the figure, in one word.
        cards: the rule holds for cards whose name contains one of these; empty: for all.
    """

    figure: str
    value: Value
    rule: str
    verdict: Callable[[float], str]
    cards: tuple[str, ...] = ()


def in_row(stage: str, scorer: str, workload: str, key: str) -> Value:
    def value(stages: Stages) -> float:
        rows = stages[stage]["rows"]
        found = [r for r in rows if (r["scorer"], r.get("workload", "")) == (scorer, workload)]
        return float(found[0][key])

    return value


def of_kernel(stage: str, workload: str, kernel: str) -> Value:
    def value(stages: Stages) -> float:
        kernels = [row for row in stages[stage]["profile"][workload] if kernel in row["name"]]
        return float(kernels[0]["ms"])

    return value


def load_clock(stages: Stages) -> float:
    return float(stages["under load"]["rows"][-1]["clock MHz"]["median"])


def http_p50(stages: Stages) -> float:
    rows = {(row["scenario"], row["way"]): row for row in stages["http"]["bundle"]["rows"]}
    return statistics.median(rows["latency", "scoring"]["latencies"])


def at_most(most: float) -> Callable[[float], str]:
    return lambda value: "met" if value <= most else "missed"


def better_than(before: float, gain: float, otherwise: str) -> Callable[[float], str]:
    return lambda value: "keep" if before - value >= gain else otherwise


def tried(stage: str, workload: str) -> Value:
    """Find the time of the best of the kernels that were tried."""

    def value(stages: Stages) -> float:
        found = [about["tried"] for name, about in stages.items() if name.startswith(stage)]
        rows = [row for row in sum(found, []) if row["ms"] and workload in row["name"]]
        if not rows:
            raise LookupError(f"no kernel of {stage} was right")
        return min(float(row["ms"]) for row in rows)

    return value


def of_fa4(ms: float) -> str:
    return "adopt" if ms <= 0.38 else "TMA in ours" if ms <= 0.42 else "forget"


H200 = ("H200",)
GOALS = (
    ("a", in_row("workloads", "backend", "a", "device ms"), 27.0),
    ("a cached", in_row("workloads", "backend", "a cached", "device ms"), 24.0),
    ("d", in_row("workloads", "backend", "d", "device ms"), 4.2),
    ("300 in the engine", in_row("workloads", "engine", "300", "wall ms"), 2.3),
    ("300 over HTTP, p50", http_p50, 3.3),
    ("Qwen3.5-0.8B, a", in_row("hybrid", "qwen3.5", "a", "device ms"), 30.0),
    ("Qwen3.5-0.8B, 300", in_row("hybrid", "qwen3.5", "300", "device ms"), 3.0),
)
RULES = (
    *(Rule(f"{name}, ms", value, f"goal <= {most}", at_most(most)) for name, value, most in GOALS),
    Rule(
        "qk_norm_rope_store of a, ms",
        of_kernel("profiles", "a", "qk_norm_rope_store"),
        "before 1.84; a gain below 0.3: revert",
        better_than(1.84, 0.3, "revert"),
        H200,
    ),
    Rule(
        "d on the device, ms",
        in_row("workloads", "backend", "d", "device ms"),
        "before 4.81; not better: revert the key tables",
        better_than(4.81, 0.0, "revert"),
        H200,
    ),
    Rule(
        "clock under load, MHz",
        load_clock,
        "below 1,900: publish sustained floors and goals",
        lambda clock: "keep" if clock >= 1900 else "adopt",
    ),
    Rule(
        "FlashAttention 4, a layer of a, ms",
        tried("fa4", ", 2000 + 500 x 20"),
        "<= 0.38: an extra; <= 0.42: TMA in ours; else forget it",
        of_fa4,
    ),
    Rule(
        "share of the sustained floor, a",
        in_row("under load", "under load", "a", "of sustained floor"),
        "goal >= 0.62",
        lambda share: "met" if share >= 0.62 else "missed",
    ),
)


def verdicts(stages: Stages, card: str, trial: bool = False) -> Iterator[Row]:
    """Yield a row per rule: the figure, the rule, and keep, revert, adopt, met, missed or open.

    A trial's figures decide nothing.
    """
    for rule in RULES:
        try:
            value = rule.value(stages)
        except (LookupError, TypeError):
            found, said = None, "open"
        else:
            here = not trial and (not rule.cards or any(name in card for name in rule.cards))
            found, said = value, rule.verdict(value) if here else "open"
        yield {
            "figure": rule.figure,
            "value": short(found),
            "rule": rule.rule,
            "verdict": said,
        }
