"""The places of several models: each engine's part of the devices' memory and of the cores."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore.backends.common.plan import ENGINE_BYTES, mebibytes
from gpuscore.config import API_KEY_VARIABLE, ModelConfig
from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout
from gpuscore.replicas.placement import Placement, core_parts, placements

ASK_SECONDS = 300.0  # torch's import, from a cold disk, and a device's first use
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Sought:
    """A model that needs a place: its name, its directory and its settings."""

    name: str
    directory: Path
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that an engine needs at least, in bytes.

    Args:
        kind: of the device, such as cpu.
        weights: of the model.
        prompt: free memory that gives it keys and values of one longest prompt, or all of
            `--kv-cache-size`.
        free: memory of the device when the question was asked.
    """

    kind: str
    weights: int
    prompt: int
    free: int


Ask: TypeAlias = Callable[[Sequence[Sought], Placement], list[Needs]]


def places_of_all(
    models: Sequence[Sought], devices: str | None, ask: "Ask | None" = None
) -> list[list[Placement]]:
    """Return each model's placements: on every device one engine of each model.

    An engine may take its model's weights, the memory of its longest prompt, and an equal part of
    what then is left. Engines on CPUs get equal parts of the cores.

    Args:
        models: in the order of `--model`.
        devices: `--devices`.
        ask: returns the needs of all models at a placement; by default asks a process that imports
            torch.

    Raises:
        ConfigError: the devices cannot be used together, a model cannot be served, or they do not
            fit together.
        EngineFailed: the process that was asked ended.
    """
    first = models[0].config
    if len(models) == 1:
        return [placements(first, devices)]
    if first.tensor_parallel > 1:
        raise ConfigError(
            f"--tensor-parallel {first.tensor_parallel} is not supported with several models"
        )
    bases = placements(first, devices)
    by_device = {base.device: base for base in bases}
    asked = {name: (ask or ask_needs)(models, base) for name, base in by_device.items()}
    on_cpu = next(iter(asked.values()))[0].kind == CPU
    together = len(bases) if on_cpu else 1  # replicas that share the memory of one device
    limits = {
        device: memory_parts([model.name for model in models], needs, first.memory_limit, together)
        for device, needs in asked.items()
    }
    cores = iter(core_parts(len(models) * len(bases))) if on_cpu else None
    return [
        [_place(base, model.config, limits[base.device][number], cores) for base in bases]
        for number, model in enumerate(models)
    ]


def memory_parts(
    names: Sequence[str], needs: Sequence[Needs], limit: int | None = None, together: int = 1
) -> list[int]:
    """Return the bytes that each model's engine may take.

    Args:
        names: of the models.
        needs: of the models, all on the same device.
        limit: `--memory-limit`, of all engines together.
        together: engines of each model that share this memory.

    Raises:
        ConfigError: they do not fit together; the message has all numbers.
    """
    free = min(one.free for one in needs)
    room = free if limit is None else min(free, limit)
    beside = ENGINE_BYTES[needs[0].kind] * (len(needs) * together - 1)
    left = room - beside - together * sum(one.weights + one.prompt for one in needs)
    if left < 0:
        raise ConfigError(_refusal(names, needs, room, beside, together))
    return [one.weights + one.prompt + left // (len(needs) * together) for one in needs]


def ask_needs(models: Sequence[Sought], place: Placement) -> list[Needs]:
    """Ask a process that imports torch, and ends before an engine starts."""
    command = [sys.executable, "-P", "-m", "gpuscore.backends.needs"]
    questions = [
        (model.name, str(model.directory), asdict(_for(place, model.config, None)))
        for model in models
    ]
    environment = {k: v for k, v in os.environ.items() if k != API_KEY_VARIABLE}
    try:
        answer = subprocess.run(
            command,
            input=json.dumps(questions),
            stdout=subprocess.PIPE,
            text=True,
            timeout=ASK_SECONDS,
            env=environment | {**place.environment},
        )
    except subprocess.TimeoutExpired:
        raise LoadTimeout(
            f"the process that plans the memory has not answered in {ASK_SECONDS:g} s"
        ) from None
    if answer.returncode:
        raise EngineFailed(
            f"the process that plans the memory ended with exit code {answer.returncode}"
        )
    found: Any = json.loads(answer.stdout.splitlines()[-1])
    if isinstance(found, dict):
        raise ConfigError(found["error"])
    return [Needs(**one) for one in found]


def _for(place: Placement, config: ModelConfig, limit: int | None) -> ModelConfig:
    """Return a model's settings at a place."""
    return replace(config, device=place.model.device, memory_limit=limit)


def _place(
    base: Placement, config: ModelConfig, limit: int, cores: Iterator[tuple[int, ...]] | None
) -> Placement:
    own = _for(base, config, limit)
    if cores is None:
        return replace(base, model=own, in_turn=True)
    return replace(base, model=own, cores=next(cores))


def _refusal(
    names: Sequence[str], needs: Sequence[Needs], room: int, beside: int, together: int
) -> str:
    each = ", ".join(
        f"{name} {mebibytes(one.weights)} of weights and {mebibytes(one.prompt)} for one longest "
        "prompt"
        for name, one in zip(names, needs, strict=True)
    )
    times = f", {together} times" if together > 1 else ""
    total = beside + together * sum(one.weights + one.prompt for one in needs)
    return (
        f"the models need {mebibytes(total)} together and may take {mebibytes(room)} of "
        f"{needs[0].kind} memory: {each}{times}, and {mebibytes(beside)} for their processes; "
        "serve fewer models, lower --max-model-len, or raise --memory-limit if it is set"
    )
