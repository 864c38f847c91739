"""The places of the engines: devices (`--devices`), cores, and whether all of them fit."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path

from msgspec import structs

from gpuscore.backends.common.estimate import plan_memory
from gpuscore.backends.common.memory import HostMemory
from gpuscore.backends.common.plan import mebibytes, nvidia_device
from gpuscore.config import ModelConfig
from gpuscore.config.served import ServedConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.worker.wire import Placement

ALL = "all"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_SECONDS = 120.0  # torch's import, from a cold disk
CPU = "cpu"
# What an engine's process on a CPU takes beside weights and pages: interpreter, libraries, batches.
ENGINE_BYTES = 2**29
_GPU = re.compile(r"cuda:(\d+)")
_ASKING = """
import torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(*(torch.cuda.mem_get_info(number)[0] for number in range(count)))
"""


def places_of_all(models: Sequence[ServedConfig], devices: str | None) -> list[list[Placement]]:
    """Return each model's placements: one engine on each device of `--devices`, or one engine on
    `--device`.

    A replica on a GPU sees only that GPU; with `--tensor-parallel N`, it gets N GPUs that follow
    each other in the list. Engines that share a device each take `--kv-cache-size` for keys and
    values, and must fit its free memory together. On CPUs they get equal parts of the cores.

    Args:
        models: the served models, in the order of `--model`.
        devices: `--devices`.

    Raises:
        ConfigError: a device is unknown or cannot be used; a setting is missing, or not supported
            with several engines on a device; or they do not fit together.
    """
    first = models[0].config
    bases = _bases(first, devices)
    device = bases[0].model.device
    on_cpu = device == CPU or (device == "auto" and nvidia_device() is None)
    copies = len(bases) if on_cpu else 1  # engines of a model that share a memory
    engines = copies * len(models)
    if engines == 1:
        return [bases]
    if first.tensor_parallel > 1:
        raise ConfigError(
            f"--tensor-parallel {first.tensor_parallel} is not supported with several engines on a "
            "device"
        )
    if first.kv_cache_size is None:
        raise ConfigError(
            f"{engines} engines on one device need --kv-cache-size, such as 2GiB: the memory of "
            "each one's keys and values"
        )
    free = HostMemory().free() if on_cpu else _free_on_gpus(bases)
    check_together(models, copies, free, on_cpu)
    cores: Iterator[tuple[int, ...]] = iter(_core_parts(engines)) if on_cpu else repeat(())

    def place(base: Placement, model: ModelConfig) -> Placement:
        return structs.replace(base, model=replace(model, device=device), cores=next(cores))

    return [[place(base, model.config) for base in bases] for model in models]


def check_together(models: Sequence[ServedConfig], copies: int, free: int, on_cpu: bool) -> None:
    """Raise ConfigError, with all numbers, if so many engines of each model do not fit together.

    Args:
        models: with their `--kv-cache-size`.
        copies: engines of each model in this memory.
        free: bytes of memory.
        on_cpu: on a GPU, what batches take is estimated from the models' shapes.
    """
    parts = []
    total = 0
    processes = 0
    for model in models:
        weights = size_of_weights(model.directory)
        cache = model.config.kv_cache_size or 0
        other = ENGINE_BYTES
        if not on_cpu:
            plan = plan_memory(model.directory, model.config, free)
            weights = plan.weight_bytes
            other = plan.context + plan.batch_bytes + plan.pages.state_bytes
        total += copies * (weights + cache + other)
        processes += copies * other
        sizes = f"{mebibytes(weights)} of weights and {mebibytes(cache)} of keys and values"
        parts.append(f"{model.name} {sizes}")
    if total > free:
        times = f", {copies} times" if copies > 1 else ""
        raise ConfigError(
            f"the engines need {mebibytes(total)} of memory together and {mebibytes(free)} are "
            f"free: {', '.join(parts)}{times}, and {mebibytes(processes)} for their processes and "
            "batches; serve fewer models or lower --kv-cache-size"
        )


def size_of_weights(directory: Path) -> int:
    """Return the bytes of a model's files of weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _core_parts(count: int) -> list[tuple[int, ...]]:
    """Return equal parts of the cores that this process may use; raises ConfigError if too few."""
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise ConfigError(
            f"{count} engines on CPUs (one of each model on each of --devices) need a core each, "
            f"but this process may use {len(cores)} cores"
        )
    bounds = [len(cores) * i // count for i in range(count + 1)]
    return [tuple(cores[bounds[i] : bounds[i + 1]]) for i in range(count)]


def _bases(model: ModelConfig, devices: str | None) -> list[Placement]:
    """Return one placement for each device in `--devices`, or the only one of `--device`."""
    if devices is None:
        return [Placement(model.device, model)]
    if model.device != "auto":
        raise ConfigError(f"--devices {devices} and --device {model.device}: set one of them")
    names = [name.strip() for name in devices.split(",")]
    if devices == ALL:
        names = [f"cuda:{index}" for index in range(len(free_cuda()))]
        if not names:
            raise ConfigError(f"--devices {ALL}: torch sees no CUDA device here")
    if set(names) == {CPU}:
        return [Placement(CPU, replace(model, device=CPU)) for _ in names]
    # Devices of different kinds would round scores differently; a second engine of a model on a GPU
    # would only halve its memory.
    if not all(map(_GPU.fullmatch, names)) or len(set(names)) < len(names):
        raise ConfigError(
            f"--devices {devices}: name different CUDA devices, such as cuda:0,cuda:1, or {ALL} "
            "for every one, or cpu for each engine on this machine's CPUs; not both kinds"
        )
    if model.backend != "torch":
        raise ConfigError(f"--devices {devices} needs --backend torch")
    if shown := os.environ.get(VISIBLE):
        raise ConfigError(
            f"--devices {devices} numbers all devices of the machine: unset {VISIBLE}={shown}"
        )
    on_gpu = replace(model, device="cuda")
    ranks = model.tensor_parallel
    if len(names) % ranks:
        raise ConfigError(
            f"--devices {devices} has {len(names)} devices, which replicas of --tensor-parallel "
            f"{ranks} cannot share equally"
        )
    groups = [names[start : start + ranks] for start in range(0, len(names), ranks)]
    return [
        Placement("+".join(group), on_gpu, {VISIBLE: ",".join(group).replace("cuda:", "")})
        for group in groups
    ]


def _free_on_gpus(bases: Sequence[Placement]) -> int:
    """Return the free bytes of the fullest one of these GPUs, by default the first one. Without a
    usable one nothing is refused here: the engines say why it is not usable."""
    free = free_cuda()
    used = [int(found[1]) for base in bases if (found := _GPU.match(base.device))] or [0]
    return min((free[number] for number in used if number < len(free)), default=sys.maxsize)


def free_cuda() -> list[int]:
    """Ask torch for the free bytes of each CUDA device, in a process that ends before the server
    starts."""
    command = [sys.executable, "-P", "-c", _ASKING]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    if answer.returncode:
        raise ConfigError(f"torch cannot list the CUDA devices: {answer.stderr}")
    return [int(size) for size in answer.stdout.splitlines()[-1].split()]
