"""The interface between the engine and a device: batch in, label logits and log-sum-exp out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores

# A batch that was launched; only the backend that returned it can read it.
Pending: TypeAlias = Any


class OutOfMemory(Exception):
    """The device had too little memory for a batch; a smaller one may succeed."""


class DeviceLost(Exception):
    """The device no longer answers this process, which has to exit; its work is lost."""


class Backend(Protocol):
    """Runs batches on a device; NumPy arrays in and out, whatever the framework.

    The engine numbers the KV pages and the backend stores them. If a backend needs padding, it pads
    by itself. Batches run in the order of their `extend` calls.
    """

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def layers_done(self) -> int:
        """Layers computed or launched so far, a sign of progress in a long batch; 0 = unknown."""

    def warmup(self) -> None:
        """Compile or capture what serving needs; blocks."""

    def extend(self, batch: PackedBatch) -> Pending:
        """Launch a forward pass without waiting for the device.

        `gpuscore.types.batch.visible_rows` defines which keys a row sees.
        """

    def collect(self, pending: Pending) -> RowScores:
        """Wait for a batch; raises OutOfMemory, DeviceLost or the error of its forward pass."""

    def close(self) -> None:
        """Free the device's memory and threads; the backend cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned model whose weights are not read yet."""

    about: str  # number format and device, for people
    load: Callable[[], Backend]  # may raise ConfigError
