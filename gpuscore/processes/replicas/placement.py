"""The devices of the replicas (`--devices`), and the share of a machine that each one gets."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError

ALL = "all"
VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNT_SECONDS = 120.0  # torch's import, from a cold disk
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

    A replica on a GPU sees that GPU alone; with `--tensor-parallel N`, the N that follow each other
    are one replica's. Replicas on CPUs get equal parts of the cores, and of
    the memory that one of them would have used.

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
    own, parts = share_of_cpu(model, count), core_parts(count)
    return [Placement("cpu", own, cores=part if count > 1 else ()) for part in parts]


def share_of_cpu(model: ModelConfig, count: int) -> ModelConfig:
    """Return the settings of each of `count` replicas that share the memory of one machine."""
    # Imported late: only here is a default of the backends needed.
    from gpuscore.backends.common.plan import MEMORY_FRACTION

    share = (model.memory_fraction or MEMORY_FRACTION["cpu"]) / count
    limit = None if model.memory_limit is None else model.memory_limit // count
    own = replace(model, device="cpu", memory_limit=limit)
    if model.kv_cache_size is None:  # that size is for each replica
        own = replace(own, memory_fraction=share)
    return own


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
    ids = [one.strip() for one in shown.split(",")]
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
