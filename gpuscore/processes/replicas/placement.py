"""The places of the engines: devices (`--devices`), and each engine's part of memory and cores."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore.backends.common.plan import ENGINE_BYTES, MEMORY_FRACTION, mebibytes
from gpuscore.config import API_KEY_VARIABLE, ModelConfig
from gpuscore.errors import ConfigError, EngineFailed, LoadTimeout

ALL = "all"
VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT_SECONDS = 120.0  # torch's import, from a cold disk
ASK_SECONDS = 300.0  # the same, and a device's first use
CPU = "cpu"
_NAME = re.compile(r"cpu|cuda:(\d+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one replica.

    Args:
        device: its name in `--devices`, in metrics and in the log.
        model: the settings, for this device and with its share of memory.
        environment: variables that the engine's process gets besides the server's.
        cores: the CPU cores that it may use; empty for all of them.
        in_turn: it loads after the models before it on the same GPU, whose free memory it measures.
    """

    device: str
    model: ModelConfig
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    in_turn: bool = False


def placements(model: ModelConfig, devices: str | None) -> list[Placement]:
    """Return one placement for each device in `--devices`, or the only one of `--device`.

    A replica on a GPU sees that GPU alone; with `--tensor-parallel N`, N neighbours in the list
    are one replica's. Replicas on CPUs get equal parts of the cores, and of the memory that a
    single one would have used.

    Raises:
        ConfigError: a name is unknown, comes twice, or does not exist here; the devices are of
            more than one kind; or `--device` is set too.
    """
    if devices is None:
        return [Placement(model.device, model)]
    if model.device != "auto":
        raise ConfigError(f"--devices {devices} and --device {model.device}: set one of them")
    names = _cuda_names() if devices == ALL else [name.strip() for name in devices.split(",")]
    unknown = [name for name in names if not _NAME.fullmatch(name)]
    if unknown:
        raise ConfigError(
            f"--devices {devices}: '{unknown[0]}' is not cpu or cuda:N; separate names by commas, "
            f"or write {ALL} for every CUDA device"
        )
    kinds = {name.split(":")[0] for name in names}
    if len(kinds) > 1:
        raise ConfigError(
            f"--devices {devices}: replicas on different kinds of devices would round scores "
            "differently; choose one kind"
        )
    return _on_cpus(model, names) if kinds == {"cpu"} else _on_gpus(model, devices, names)


def _on_cpus(model: ModelConfig, names: list[str]) -> list[Placement]:
    count = len(names)
    limit = None if model.memory_limit is None else model.memory_limit // count
    own = replace(model, device="cpu", memory_limit=limit)
    if model.kv_cache_size is None:  # that size is for each replica
        share = (model.memory_fraction or MEMORY_FRACTION["cpu"]) / count
        own = replace(own, memory_fraction=share)
    elif count > 1:  # without a share no replica can tell whether float32 fits for all replicas
        own = own.unmeasured()
    return [Placement("cpu", own, cores=part if count > 1 else ()) for part in core_parts(count)]


def core_parts(count: int) -> list[tuple[int, ...]]:
    """Return equal parts of the cores that this process may use; raises ConfigError if too few."""
    cores = _cores()
    if count > len(cores):
        raise ConfigError(
            f"{count} engines on CPUs (one of each model on each of --devices) need a core each, "
            f"but this process may use {len(cores)} cores"
        )
    bounds = [len(cores) * i // count for i in range(count + 1)]
    return [tuple(cores[bounds[i] : bounds[i + 1]]) for i in range(count)]


def _on_gpus(model: ModelConfig, devices: str, names: list[str]) -> list[Placement]:
    if model.backend != "torch":
        raise ConfigError(f"--devices {devices} needs --backend torch")
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--devices {devices}: a device is named twice; a second replica on one GPU would only "
            "halve its memory"
        )
    own, ranks = replace(model, device="cuda"), model.tensor_parallel
    if len(names) % ranks:
        raise ConfigError(
            f"--devices {devices} has {len(names)} devices, which replicas of --tensor-parallel "
            f"{ranks} cannot share equally"
        )
    groups = [names[start : start + ranks] for start in range(0, len(names), ranks)]
    return [
        Placement(
            "+".join(group), own, {VISIBLE: ",".join(_visible(devices, name) for name in group)}
        )
        for group in groups
    ]


def _visible(devices: str, name: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows this device alone."""
    index = name.removeprefix("cuda:")
    shown = os.environ.get(VISIBLE)
    if shown is None:
        return index
    ids = [device.strip() for device in shown.split(",")]
    if int(index) >= len(ids):
        raise ConfigError(
            f"--devices {devices}: there is no {name}, because {VISIBLE}={shown} shows "
            f"{len(ids)} devices"
        )
    return ids[int(index)]


def _cuda_names() -> list[str]:
    """Ask torch for the number of CUDA devices, in a process that ends before the server starts."""
    question = "from gpuscore.backends.torch.devices import count_cuda; print(count_cuda())"
    command = [sys.executable, "-P", "-c", question]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_SECONDS)
    if answer.returncode:
        raise ConfigError(f"--devices {ALL}: the CUDA devices cannot be counted: {answer.stderr}")
    count = int(answer.stdout.split()[-1])
    if not count:
        raise ConfigError(f"--devices {ALL}: torch sees no CUDA device here")
    return [f"cuda:{index}" for index in range(count)]


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux only
    return sorted(usable(0)) if usable else list(range(os.cpu_count() or 1))


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
        prompt: for the keys and values of one longest prompt, or for all of `--kv-cache-size`.
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
    free = min(need.free for need in needs)
    room = free if limit is None else min(free, limit)
    beside = ENGINE_BYTES[needs[0].kind] * (len(needs) * together - 1)
    left = room - beside - together * sum(need.weights + need.prompt for need in needs)
    if left < 0:
        raise ConfigError(_refusal(names, needs, room, beside, together))
    return [need.weights + need.prompt + left // (len(needs) * together) for need in needs]


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
    answered: Any = json.loads(answer.stdout.splitlines()[-1])
    if isinstance(answered, dict):
        raise ConfigError(answered["error"])
    return [Needs(**need) for need in answered]


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
    parts = ", ".join(
        f"{name} {mebibytes(need.weights)} of weights and {mebibytes(need.prompt)} for one longest "
        "prompt"
        for name, need in zip(names, needs, strict=True)
    )
    times = f", {together} times" if together > 1 else ""
    total = beside + together * sum(need.weights + need.prompt for need in needs)
    return (
        f"the models need {mebibytes(total)} together and may take {mebibytes(room)} of "
        f"{needs[0].kind} memory: {parts}{times}, and {mebibytes(beside)} for their processes; "
        "serve fewer models, lower --max-model-len, or raise --memory-limit if it is set"
    )
