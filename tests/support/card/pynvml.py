"""nvidia-ml-py, as it answers on a card under load."""

from itertools import cycle

NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
clocks = cycle((1500, 1510, 1485))


def nvmlInit():
    pass


def nvmlDeviceGetHandleByIndex(number):
    return number


def nvmlDeviceGetClockInfo(card, kind):
    return next(clocks)


def nvmlDeviceGetPowerUsage(card):
    return 690_600


def nvmlDeviceGetTemperature(card, kind):
    return 58
