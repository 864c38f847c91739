"""`gpuscore calibrate`: reads labelled questions, fits, measures, and writes the calibration."""

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.config import ModelConfig
from gpuscore.config.served import check_single
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError, InvalidRequest
from gpuscore.measure.calibrate.fit import fit, out_of_fold
from gpuscore.measure.calibrate.labelled import LabelledScorer, read_rows
from gpuscore.measure.calibrate.metrics import bins, measures
from gpuscore.measure.calibrate.samples import Judged, Samples
from gpuscore.measure.intervals import Interval
from gpuscore.measure.plots import Bin, reliability
from gpuscore.measure.progress import progress
from gpuscore.models.hub import model_name
from gpuscore.prompts.calibration import Calibration, Kind, Scaling

ROWS_PER_FOLD = 4  # with a type of question; with fewer, a fit says little
BAR = 200  # rows; with as many or more, a progress bar is shown


@dataclass(frozen=True, slots=True)
class CalibratedKind:
    """The calibration of one type of question.

    Args:
        scaling: fitted on all rows.
        questions: their number.
        before, after: measures by name; after, by scalings that were fitted without the row.
        bins: those before and after.
    """

    scaling: Scaling
    questions: int
    before: Mapping[str, Interval]
    after: Mapping[str, Interval]
    bins: tuple[list[Bin], list[Bin]]

    def as_json(self) -> dict[str, Any]:
        measured = {
            when: {name: _listed(interval) for name, interval in measures.items()}
            for when, measures in (("before", self.before), ("after", self.after))
        }
        return {"questions": self.questions} | measured


def calibrate(values: argparse.Namespace, settings: Settings) -> int:
    """Run the command; return the exit code.

    Raises:
        ConfigError: a file cannot be read or written.
        InvalidRequest: the data has bad rows, or too few of them; or the model cannot answer.
    """
    check_single(settings)
    config, order = settings.make(ModelConfig), settings.chosen["decision_order"].value
    rows = read_rows(values.data)
    with (
        LabelledScorer(config, family="none", decision_order=order) as scorer,
        progress(len(rows), "row", BAR) as begin,
    ):
        samples = scorer.samples(values.data, rows, begin(""))
    outcomes = {
        kind: outcome
        for kind, of_kind in samples.items()
        if (outcome := calibrated(of_kind, values.bias, values.folds, values.seed)) is not None
    }
    left = {kind: of_kind for kind, of_kind in samples.items() if kind not in outcomes}
    if not outcomes:
        raise InvalidRequest(_too_few(left, values.folds))
    about = {
        "model": model_name(config.model),
        "decision_order": order,
        "data_sha256": hashlib.sha256(values.data.read_bytes()).hexdigest(),
        "rows": len(rows),
        "folds": values.folds,
        "measured": {kind: outcome.as_json() for kind, outcome in outcomes.items()},
    }
    made = Calibration({kind: outcome.scaling for kind, outcome in outcomes.items()}, about)
    _write(values.output, json.dumps(made.as_json(), indent=1) + "\n")
    panels = {
        f"{kind}, {outcome.questions} questions": outcome.bins for kind, outcome in outcomes.items()
    }
    _write(values.diagram, reliability(panels, f"Reliability of {about['model']}"))
    print(report(outcomes))
    if left:
        print(_too_few(left, values.folds))
    print(f"written: {values.output}, {values.diagram}")
    return 0


def calibrated(samples: Samples, with_bias: bool, folds: int, seed: int) -> CalibratedKind | None:
    """Return the outcome for one type of question; None if there are too few rows."""
    if len(set(samples.rows.tolist())) < ROWS_PER_FOLD * folds:
        return None
    before = Judged.of(samples, samples.shares(Scaling()))
    after = out_of_fold(samples, with_bias, folds, seed)
    return CalibratedKind(
        fit(samples, with_bias),
        samples.num_questions,
        measures(before, seed),
        measures(after, seed),
        (bins(before), bins(after)),
    )


def report(outcomes: Mapping[Kind, CalibratedKind]) -> str:
    """Return a table of the measures, with intervals of 95 %."""
    lines = []
    for kind, outcome in outcomes.items():
        lines.append(
            f"{kind}: {outcome.questions} questions, temperature {outcome.scaling.temperature:.4f}"
        )
        for name, before in outcome.before.items():
            lines.append(f"  {name:9} {before:.4f} -> {outcome.after[name]:.4f}")
    return "\n".join(lines)


def _listed(interval: Interval) -> list[float]:
    return [round(number, 6) for number in (interval.value, interval.low, interval.high)]


def _too_few(samples: Mapping[Kind, Samples], folds: int) -> str:
    counts = ", ".join(
        f"{kind} has {len(set(of_kind.rows.tolist()))} rows" for kind, of_kind in samples.items()
    )
    return f"not fitted: {counts}; {folds} folds need {ROWS_PER_FOLD * folds}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
