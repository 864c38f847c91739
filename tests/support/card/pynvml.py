"""nvidia-ml-py, as it answers on a card under load."""

from itertools import cycle

NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVMLError = 1, 0, OSError
clocks = cycle((1500, 1510, 1485))


def nvmlInit():
    pass


def nvmlDeviceGetHandleByIndex(number):
    return number


def nvmlSystemGetDriverVersion():
    return "580.1"


def nvmlDeviceGetMaxClockInfo(card, kind):
    return 1980


def nvmlDeviceGetPowerManagementLimit(card):
    return 700_000


def nvmlDeviceGetClockInfo(card, kind):
    return next(clocks)


def nvmlDeviceGetPowerUsage(card):
    return 690_600


def nvmlDeviceGetTemperature(card, kind):
    return 58
