"""The places of the engines: devices (`--devices`), and each engine's part of memory and cores."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.common.plan import (
    MEMORY_FRACTION,
    mebibytes,
    nvidia_device,
)
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

ALL = "all"
VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT_SECONDS = 120.0  # torch's import, from a cold disk
CPU = "cpu"
# What an engine's process on a CPU takes beside weights and pages: interpreter, libraries, batches.
ENGINE_BYTES = 2**29
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
    own = replace(model, device="cpu")
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

    @property
    def weights(self) -> int:
        """Bytes of the files of weights."""
        return sum(path.stat().st_size for path in self.directory.glob("*.safetensors"))


def places_of_all(models: Sequence[Sought], devices: str | None) -> list[list[Placement]]:
    """Return each model's placements: on every device one engine of each model.

    Each has keys and values of `--kv-cache-size`. On a GPU an engine loads after those before it,
    and is refused if what is free then does not do; on CPUs, whose memory is given out later, all
    are held against it here, and get equal parts of the cores.

    Args:
        models: in the order of `--model`.
        devices: `--devices`.

    Raises:
        ConfigError: the devices cannot be used together, a setting is missing or does not go with
            several models, or they do not fit together.
    """
    first = models[0].config
    if len(models) == 1:
        return [placements(first, devices)]
    if first.tensor_parallel > 1:
        raise ConfigError(
            f"--tensor-parallel {first.tensor_parallel} is not supported with several models"
        )
    if first.kv_cache_size is None:
        raise ConfigError(
            f"{len(models)} models need --kv-cache-size, such as 2GiB: the memory of each one's "
            "keys and values, on every device"
        )
    bases = placements(first, devices)
    device = bases[0].model.device
    on_cpu = device == CPU or (device == "auto" and nvidia_device() is None)
    if on_cpu:
        check_together(models, len(bases), HostMemory().free())
    cores = iter(core_parts(len(models) * len(bases))) if on_cpu else None
    return [[_place(base, model.config, cores) for base in bases] for model in models]


def check_together(models: Sequence[Sought], replicas: int, free: int) -> None:
    """Raise ConfigError, with all numbers, if so many replicas of the models do not fit together.

    Args:
        models: with their `--kv-cache-size`.
        replicas: of each model.
        free: bytes of memory.
    """
    caches = [model.config.kv_cache_size or 0 for model in models]
    weights = [model.weights for model in models]
    processes = ENGINE_BYTES * replicas * len(models)
    total = processes + replicas * (sum(weights) + sum(caches))
    if total <= free:
        return
    parts = ", ".join(
        f"{model.name} {mebibytes(size)} of weights and {mebibytes(cache)} of keys and values"
        for model, size, cache in zip(models, weights, caches, strict=True)
    )
    times = f", {replicas} times" if replicas > 1 else ""
    raise ConfigError(
        f"the models need {mebibytes(total)} of memory together and {mebibytes(free)} are free: "
        f"{parts}{times}, and {mebibytes(processes)} for their processes; serve fewer models or "
        "lower --kv-cache-size"
    )


def _place(
    base: Placement, config: ModelConfig, cores: Iterator[tuple[int, ...]] | None
) -> Placement:
    own = replace(config, device=base.model.device)
    if cores is None:
        return replace(base, model=own, in_turn=True)
    # None of them can tell whether float32 fits for all.
    return replace(base, model=own.unmeasured(), cores=next(cores))
