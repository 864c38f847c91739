"""The goals that the figures of a day with a card are held against (bench/README.md)."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from report import Row, short

Stages = Mapping[str, Mapping[str, Any]]
Value = Callable[[Stages], float]
CARD = "H200"  # the goals are for one


@dataclass(frozen=True)
class Goal:
    """A figure of the day, and the most, or with `least` the least, that it should be.

    Args:
        figure: what it is, with its unit.
        value: finds it in the findings of all stages; raises LookupError if it is not there.
        goal: the number.
        least: at least that.
    """

    figure: str
    value: Value
    goal: float
    least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.goal if self.least else value <= self.goal


def best(scorer: str, workload: str, key: str, least: bool = False) -> Value:
    """Find a figure of the attention that does best; `scorer` has {} in place of its name."""

    def value(stages: Stages) -> float:
        found = [
            float(row[key])
            for name in ("triton", "fa4")
            for row in stages.get(name, {}).get("rows", ())
            if (row["scorer"], row.get("workload")) == (scorer.format(name), workload)
            and key in row
        ]
        if not found:
            raise LookupError(f"{scorer} of {workload} was not measured")
        return max(found) if least else min(found)

    return value


def hybrid(workload: str) -> Value:
    def value(stages: Stages) -> float:
        rows = {(row["scorer"], row["workload"]): row for row in stages["hybrid"]["rows"]}
        return float(rows["qwen3.5", workload]["device ms"])

    return value


def http_p50(stages: Stages) -> float:
    rows = {(row["scenario"], row["way"]): row for row in stages["http"]["bundle"]["rows"]}
    return statistics.median(rows["latency", "scoring"]["latencies"])


GOALS = (
    Goal("a, ms", best("{}", "a", "device ms"), 27.0),
    Goal("a cached, ms", best("{}", "a cached", "device ms"), 24.0),
    Goal("d, ms", best("{}", "d", "device ms"), 4.2),
    Goal("300 in the engine, ms", best("{}, engine", "300", "wall ms"), 2.3),
    Goal("300 over HTTP, p50, ms", http_p50, 3.3),
    Goal("Qwen3.5-0.8B, a, ms", hybrid("a"), 30.0),
    Goal("Qwen3.5-0.8B, 300, ms", hybrid("300"), 3.0),
    Goal("a, share of the floor", best("{}", "a", "of floor", least=True), 0.7, least=True),
    Goal(
        "a under load, share of the sustained floor",
        best("{} under load", "a", "of sustained floor", least=True),
        0.62,
        least=True,
    ),
)


def verdicts(stages: Stages, card: str, trial: bool = False) -> Iterator[Row]:
    """Yield a row per goal: met, missed, or open, as all are on another card and in a trial."""
    for goal in GOALS:
        try:
            value = goal.value(stages)
        except (LookupError, TypeError):
            value, said = None, "open"
        else:
            decides = CARD in card and not trial
            said = "open" if not decides else "met" if goal.met(value) else "missed"
        wanted = f"{'>=' if goal.least else '<='} {goal.goal}"
        yield {"figure": goal.figure, "value": short(value), "goal": wanted, "verdict": said}
