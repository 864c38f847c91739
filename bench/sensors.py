"""Clock, power and temperature of this machine's first NVIDIA GPU, by NVML (nvidia-ml-py)."""

import statistics
import threading
from importlib import import_module
from typing import TypeAlias

PERIOD = 0.01  # seconds between two samples
Reading: TypeAlias = dict[str, dict[str, float]]  # by sensor: median, least and largest sample


class Sampler:
    """Reads the sensors in a thread from now on, until `stop`. Changes nothing."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {"clock MHz": [], "power W": [], "C": []}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
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
