"""The card on which figures were measured: its name, its sensors, the versions of libraries."""

import platform
import statistics
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PERIOD = 0.01  # seconds between two samples
PACKAGES = ("triton", "transformers", "numpy", "jax", "flashinfer-python", "nvidia-ml-py")


def card(device: str) -> dict[str, Any]:
    """Return the device, cuda or cpu, and the versions that its figures depend on."""
    import torch  # slow to import, and the tests of the day need none

    versions = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    if device != "cuda":
        return {"device": "cpu"} | versions
    about = torch.cuda.get_device_properties(device)
    return {
        "device": about.name,
        "sm": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory MiB": about.total_memory >> 20,
        **driver(),
    } | versions


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver() -> dict[str, Any]:
    """Return driver, largest clock and power limit of the first card, by NVML."""
    nvml, handle = _opened()
    return {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "largest clock MHz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power limit W": nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3,
    }


def _opened() -> tuple[Any, Any]:
    import pynvml  # of nvidia-ml-py, which machines without a card need not have

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)


class Sampler:
    """Reads the first card's clock, power and temperature every 10 ms, in a thread, until `stop`.

    Changes nothing. On a CPU there are no samples.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.samples: dict[str, list[float]] = {"clock MHz": [], "power W": [], "C": []}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        if on_cuda:
            self._thread.start()

    def _read(self) -> None:
        nvml, handle = _opened()
        while not self._over.wait(PERIOD):
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            self.samples["clock MHz"].append(clock)
            self.samples["power W"].append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
            heat = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            self.samples["C"].append(heat)

    def stop(self) -> Mapping[str, Any]:
        """Return median, least and largest sample of each sensor."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        return {
            name: {"median": statistics.median(read), "least": min(read), "largest": max(read)}
            for name, read in self.samples.items()
            if read
        }
