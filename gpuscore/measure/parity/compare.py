"""The command `gpuscore parity compare`: bundles with each other, or with a reference."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from gpuscore.errors import ConfigError
from gpuscore.measure.parity.bundle import Bundle, read_bundle, refuse_different
from gpuscore.measure.parity.gates import Comparison, Verdict, judge, judge_pair, packing
from gpuscore.measure.parity.measures import differences
from gpuscore.measure.parity.metrics import errors
from gpuscore.measure.parity.output import conclude, hardware_of, listed, now
from gpuscore.measure.parity.runs import Run
from gpuscore.measure.parity.workload import Workload
from gpuscore.measure.reports import aligned


def compare(values: argparse.Namespace) -> int:
    """Compare bundles: every pair, or with --reference each with the oracle's."""
    places = [*values.bundles, *(values.reference or ())]
    if len(values.bundles) < (1 if values.reference else 2):
        raise ConfigError(
            "one bundle has nothing to be compared with: name a second one, or --reference"
        )
    bundles = [read_bundle(Path(place)) for place in places]
    for other in bundles[1:]:
        refuse_different(bundles[0], other)
    facts = {
        str(place): f"{bundle.run.name} on {hardware_of(bundle.about)}"
        for place, bundle in zip(places, bundles, strict=True)
    }
    for place, what in facts.items():
        print(f"{place}: {what}")
    for place, bundle in zip(places, bundles, strict=True):
        facts[f"{place}, versions"] = listed(bundle.about.get("versions"))
        facts[f"{place}, environment"] = listed(bundle.about.get("environment"))
        facts[f"{place}, made"] = str(bundle.about.get("created", "unknown"))
    facts["date"] = now()
    runs = [_named(place, bundle) for place, bundle in zip(places, bundles, strict=True)]
    workload, count = bundles[0].workload, len(values.bundles)
    if values.reference:
        reference = OracleRuns.of(runs[count:])
        comparisons, verdicts = reference.judge(workload, runs[:count])
        against = f"against {reference.exact.name}"
    else:
        comparisons, verdicts = _pairs(workload, runs)
        against = (
            f"against {comparisons[0].want.name}" if count == 2 else "of every pair of bundles"
        )
    if count > 2:
        print(f"\np99 |d log p| of every pair\n{matrix(workload, runs[:count])}")
    title = f"Parity of {'two' if count == 2 else count} bundles"
    return conclude(title, facts, workload, comparisons, verdicts, values.report, against)


@dataclass(frozen=True, slots=True)
class OracleRuns:
    """Runs of the oracle: exact, and rounded to formats of half precision."""

    exact: Run
    rounded: dict[str, Run]  # by dtype

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "OracleRuns":
        """Tell the runs apart by their dtype.

        Raises:
            ConfigError: not one of them is float32, or two have one dtype.
        """
        by_dtype = {run.dtype: run for run in runs}
        if len(by_dtype) < len(runs) or any(run.precision != "full" for run in runs):
            raise ConfigError(
                "--reference takes one bundle in float32 and at most one for each other dtype, "
                f"without quantization; these are {', '.join(run.name for run in runs)}"
            )
        if "float32" not in by_dtype:
            raise ConfigError(f"--reference has no bundle in float32, only {', '.join(by_dtype)}")
        exact = by_dtype.pop("float32")
        return cls(exact, by_dtype)

    def judge(
        self, workload: Workload, runs: Sequence[Run]
    ) -> tuple[list[Comparison], list[Verdict]]:
        """Judge each run as `parity run` does.

        Raises:
            ConfigError: there is no rounded run for the dtype of one of them.
        """
        comparisons, verdicts = [], []
        for yardstick in self.rounded.values():  # for the table only, without verdicts
            comparisons.append(judge(workload, self.exact, yardstick, yardstick)[0])
        for run in runs:
            needs = run.dtype != "float32" and not run.in_eight_bits
            if needs and run.dtype not in self.rounded:
                raise ConfigError(
                    f"{run.name} is in {run.dtype}: --reference needs transformers in {run.dtype} "
                    f"beside {self.exact.name} (gpuscore parity record --oracle --dtype "
                    f"{run.dtype})"
                )
            found, more = judge(workload, self.exact, self.rounded.get(run.dtype), run)
            comparisons.append(found)
            verdicts += more
        return comparisons, verdicts


def matrix(workload: Workload, runs: Sequence[Run]) -> str:
    """Return the table of the p99 differences in log p between all runs."""
    rows = [
        [one.name] + [f"{errors(differences(workload, one, two)[0]).p99:.1e}" for two in runs]
        for one in runs
    ]
    return aligned(["", *(run.name for run in runs)], rows)


def _pairs(workload: Workload, runs: Sequence[Run]) -> tuple[list[Comparison], list[Verdict]]:
    comparisons, verdicts = [], []
    for one, two in combinations(runs, 2):
        found, more = judge_pair(workload, one, two)
        comparisons.append(found)
        verdicts += more
    return comparisons, [*verdicts, *map(packing, runs)]


def _named(place: str, bundle: Bundle) -> Run:
    return replace(bundle.run, name=f"{Path(place).name} ({bundle.run.name})")
