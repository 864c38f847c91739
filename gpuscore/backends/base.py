"""The line between the engine and a device: batch in, label logits and log-sum-exp out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gpuscore.batch import PackedBatch, RowScores
from gpuscore.limits import BackendLimits

# A batch under way; opaque to everyone but the backend that returned it.
Pending: TypeAlias = Any


class OutOfMemory(Exception):
    """The device had too little memory for a batch; a smaller one may succeed."""


class DeviceLost(Exception):
    """The device does nothing more for this process, which has to end: its work is lost."""


class Backend(Protocol):
    """Plain arrays cross this interface, so that torch and JAX are equal citizens.

    Pages are numbered by the engine and stored by the backend; padding is the backend's own
    business. Batches run in the order of their `extend` calls.
    """

    @property
    def limits(self) -> BackendLimits: ...

    def warmup(self) -> None:
        """Compile or capture what serving needs; blocks."""

    def extend(self, batch: PackedBatch) -> Pending:
        """Launch a forward pass without waiting for the device.

        Which keys a row sees is said by `gpuscore.batch.visible_rows`.
        """

    def collect(self, pending: Pending) -> RowScores:
        """Wait for a batch; raises OutOfMemory, DeviceLost or what its forward pass raised."""

    def close(self) -> None:
        """Free the device's memory and threads; the backend cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be served, before its weights are read."""

    about: str  # number format and device, for people
    load: Callable[[], Backend]  # may raise ConfigError
