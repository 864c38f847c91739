"""Facts of a model's files about typed questions: how it was trained to be asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object, shown
from gpuscore.prompts.calibration import Calibration, is_temperature, same_temperature
from gpuscore.prompts.decisions import DecisionSettings

TEMPERATURE, STATE_FORMAT = "decision_temperature", "decision_state_format"
FORMATS = ("text", "json")
ENTRY = "decision"  # every entry of config.json that begins so says something about questions
# Formats of their own, which come with templates or heads that this server does not know.
OTHERS = ("decision_config.json", "decision_template.jinja", "kenning.json", "s1_config.json")


@dataclass(frozen=True, slots=True)
class Asking:
    """The choices of who runs the model.

    Args:
        order: "fixed" or "balanced".
        calibration: in place of the temperature that the model's files name.
    """

    order: str = "fixed"
    calibration: Calibration | None = None


def read_asking(order: str, calibration: str | None) -> Asking:
    """Return these choices; raise ConfigError if the calibration's file is not valid."""
    if calibration is None:
        return Asking(order)
    found = Calibration.read(Path(calibration))
    fitted = found.about.get("decision_order", order)
    if fitted != order:
        raise ConfigError(
            f"--calibration {calibration} was fitted with --decision-order {shown(fitted)}, not "
            f"{order}"
        )
    return Asking(order, found)


def read_decision_settings(directory: Path, asked: Asking) -> DecisionSettings:
    """Return the settings of a model's typed questions.

    Raises:
        ConfigError: an entry of config.json has a value that it cannot have.
    """
    path = directory / "config.json"
    found = {k: v for k, v in (read_object(path) or {}).items() if k.startswith(ENTRY)}
    own = _calibration(found, path)
    form = found.get(STATE_FORMAT, FORMATS[0])
    if form not in FORMATS:
        raise ConfigError(f"{path}: {STATE_FORMAT} must be text or json, found {shown(form)}")
    return DecisionSettings(
        order=asked.order,
        calibration=own if asked.calibration is None else asked.calibration,
        json_state=form == "json",
        refused=_refused(directory, found),
    )


def _calibration(found: Mapping[str, Any], path: Path) -> Calibration:
    value = found.get(TEMPERATURE)
    if value is None:
        return Calibration()
    if not is_temperature(value):
        raise ConfigError(f"{path}: {TEMPERATURE} must be positive, found {shown(value)}")
    return same_temperature(float(value))


def _refused(directory: Path, found: Mapping[str, Any]) -> str:
    """Return why the model cannot be asked in prompts of ours; empty if it can."""
    unknown = sorted(set(found) - {TEMPERATURE, STATE_FORMAT})
    if unknown:
        return f"its config.json has {shown(unknown[0])}, a way to ask that is not supported"
    for name in OTHERS:
        if (directory / name).exists():
            return f"its folder has {name}, a way to ask that is not supported"
    return ""
