"""Clock, power and temperature of this machine's first NVIDIA GPU, by NVML (nvidia-ml-py)."""

import statistics
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

PERIOD = 0.01  # seconds between two samples
CLOCK, POWER, HEAT = "clock MHz", "power W", "C"
Reading: TypeAlias = dict[str, dict[str, float]]  # by sensor: median, least and largest sample


def limits() -> dict[str, Any]:
    """Return the driver, the highest clock and the limit of power; empty without NVML or a GPU."""
    if find_spec("pynvml") is None:
        return {}
    nvml = import_module("pynvml")
    try:
        handle = _first_of(nvml)
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "largest clock MHz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power limit W": nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3,
        }
    except nvml.NVMLError:
        return {}


def _first_of(nvml: Any) -> Any:
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByIndex(0)


class Sampler:
    """Reads the sensors in a thread from now on, until `stop`. Changes nothing."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {CLOCK: [], POWER: [], HEAT: []}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        nvml = import_module("pynvml")
        handle = _first_of(nvml)
        clock, power, heat = self._samples.values()
        while not self._over.wait(PERIOD):
            clock.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            power.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
            heat.append(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))

    def stop(self) -> Reading:
        """Return what was read; empty if there was no time for a sample."""
        self._over.set()
        self._thread.join()
        return {
            name: {"median": statistics.median(read), "least": min(read), "largest": max(read)}
            for name, read in self._samples.items()
            if read
        }
