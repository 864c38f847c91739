"""Calibration of typed questions: how the logits of their labels become probabilities.

A type of question has a temperature, and may have a bias for each place in the list of labels
(Guo et al., 2017, "On calibration of modern neural networks": temperature and vector scaling):

    probability = softmax(log-probability / temperature + bias)

`gpuscore calibrate` fits them and writes them as JSON.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import softmax

Kind: TypeAlias = Literal["noul", "choice", "score"]  # of questions, by System One's names
KINDS: tuple[Kind, ...] = get_args(Kind)
VERSION = 1
MAX_BIAS = 50.0  # nats; a larger one leaves an option no chance


@dataclass(frozen=True, slots=True)
class Scaling:
    """The calibration of one type of question.

    Args:
        temperature: divides log-probabilities; positive and finite.
        bias: added at each place in the list of labels; places after its end get 0.
    """

    temperature: float = 1.0
    bias: tuple[float, ...] = ()

    def shares(self, logprobs: Float64Array) -> Float64Array:
        """Return probabilities [N, L], which sum to 1, of labels' log-probabilities [N, L]."""
        bias = np.zeros(logprobs.shape[1])
        known = self.bias[: len(bias)]
        bias[: len(known)] = known
        if not bias.any():
            return softmax(logprobs, self.temperature)
        return softmax(logprobs / self.temperature + bias)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of a model's typed questions.

    Args:
        scalings: by type of question; a type without one keeps the model's own probabilities.
        about: what the file says besides, such as the model and the rows that it was fitted on.
    """

    scalings: Mapping[Kind, Scaling] = field(default_factory=lambda: MappingProxyType({}))
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, kind: Kind) -> Scaling:
        return self.scalings.get(kind, Scaling())

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file that `read` reads."""
        types = {
            kind: {"temperature": one.temperature, "bias": list(one.bias)}
            for kind, one in self.scalings.items()
        }
        return {"version": VERSION, "types": types} | dict(self.about)

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read a file of `gpuscore calibrate`; raise ConfigError if it is none."""
        found = read_object(path)
        if found is None:
            raise ConfigError(f"--calibration {path}: there is no such file")
        if found.get("version") != VERSION:
            raise ConfigError(f"--calibration {path}: version must be {VERSION}")
        types = found.get("types")
        if not isinstance(types, dict) or not set(types) <= set(KINDS):
            raise ConfigError(f"--calibration {path}: types must name {', '.join(KINDS)} only")
        scalings = {kind: _scaling(types[kind], f"{path}: {kind}") for kind in types}
        about = {name: found[name] for name in found if name not in ("version", "types")}
        return cls(scalings, about)


def same_temperature(temperature: float) -> Calibration:
    """Return the calibration with one temperature for all types of questions."""
    return Calibration({kind: Scaling(temperature) for kind in KINDS})


def _scaling(given: object, place: str) -> Scaling:
    if not isinstance(given, dict):
        raise ConfigError(f"--calibration {place} must be an object")
    temperature, bias = given.get("temperature", 1.0), given.get("bias", [])
    if not is_temperature(temperature):
        raise ConfigError(f"--calibration {place}: temperature must be positive and finite")
    if not isinstance(bias, list) or not all(map(_is_bias, bias)):
        raise ConfigError(
            f"--calibration {place}: bias must be numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}"
        )
    return Scaling(float(temperature), tuple(map(float, bias)))


def is_temperature(value: object) -> bool:
    return _is_number(value) and 0 < float(value) < math.inf  # type: ignore[arg-type]


def _is_bias(value: object) -> bool:
    return _is_number(value) and -MAX_BIAS <= float(value) <= MAX_BIAS  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
