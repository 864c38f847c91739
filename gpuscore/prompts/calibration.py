"""Calibration of typed questions: how the logits of their labels become probabilities.

A type of question has a temperature, and may have a bias for each place in the list of labels
(Guo et al., 2017, "On calibration of modern neural networks": temperature and vector scaling):

    probability = softmax(log-probability / temperature + bias)

`gpuscore calibrate` fits them and writes them as JSON.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from msgspec import Meta, ValidationError, convert

from gpuscore.errors import ConfigError
from gpuscore.models.files import read_object
from gpuscore.types.batch import Float64Array
from gpuscore.types.labels import softmax

Kind: TypeAlias = Literal["noul", "choice", "score"]  # of questions, by System One's names
KINDS: tuple[Kind, ...] = get_args(Kind)
VERSION = 1
MAX_BIAS = 50.0  # nats; a larger one leaves an option no chance
Temperature: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


@dataclass(frozen=True, slots=True)
class Scaling:
    """The calibration of one type of question.

    Args:
        temperature: divides log-probabilities; positive and finite.
        bias: added at each place in the list of labels; places after its end get 0.
    """

    temperature: Temperature = 1.0
    bias: tuple[Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)], ...] = ()

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
        about: the file's other facts, such as the model and the rows that it was fitted on.
    """

    scalings: Mapping[Kind, Scaling] = field(default_factory=lambda: MappingProxyType({}))
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, kind: Kind) -> Scaling:
        return self.scalings.get(kind, Scaling())

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file that `read` reads."""
        types = {
            kind: {"temperature": scaling.temperature, "bias": list(scaling.bias)}
            for kind, scaling in self.scalings.items()
        }
        return {"version": VERSION, "types": types} | dict(self.about)

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read a file of `gpuscore calibrate`; raise ConfigError for any other file."""
        content = read_object(path)
        if content is None:
            raise ConfigError(f"--calibration {path}: there is no such file")
        if content.get("version") != VERSION:
            raise ConfigError(f"--calibration {path}: version must be {VERSION}")
        try:
            scalings = convert(content.get("types"), dict[Kind, Scaling])
        except ValidationError as error:
            raise ConfigError(f"--calibration {path}: types: {error}") from error
        about = {name: content[name] for name in content if name not in ("version", "types")}
        return cls(scalings, about)


def same_temperature(temperature: float) -> Calibration:
    """Return the calibration with one temperature for all types of questions."""
    return Calibration({kind: Scaling(temperature) for kind in KINDS})
