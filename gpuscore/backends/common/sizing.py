"""How many KV pages there are: what weights and the largest batch leave, times a fraction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gpuscore.backends.common.memory import Memory
from gpuscore.errors import ConfigError

Run: TypeAlias = Callable[[], object]

UNMEASURED = 0.5  # of the free memory is kept for a batch whose peak cannot be measured


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes that were free once the weights were in, and what the largest batch took of them."""

    free: int
    batch: int
    estimated: bool  # `batch` is a guess, because the system does not tell


@dataclass(frozen=True, slots=True)
class PagePlan:
    """How the number of pages follows from the memory that there is."""

    size: int  # tokens of a page
    page_bytes: int  # over all layers
    max_model_len: int
    needed: int  # pages of one prompt of that length
    most: int | None  # more are of no use; None = as many as fit
    fraction: float  # of the memory that is left
    exact_bytes: int | None  # what all pages may take, instead of most and fraction

    def count(self, free: int, batch: int) -> int:
        """The number of pages.

        Args:
            free: bytes that are left beside the weights.
            batch: bytes that the largest batch takes of those.

        Raises:
            ConfigError: they cannot hold one prompt of full length, or `exact_bytes` do not fit.
        """
        rest = max(0, free - batch)
        left = f"the weights leave {mebibytes(free)}, the largest batch takes {mebibytes(batch)}"
        if self.exact_bytes is None:
            pages = int(rest * self.fraction) // self.page_bytes
            pages = pages if self.most is None else min(pages, self.most)
            self._check(pages, f"{left}, {self.fraction:g} of the rest is for pages", "")
            return pages
        pages = self.exact_bytes // self.page_bytes
        self._check(pages, "", " or raise --kv-cache-size")
        if self.exact_bytes > rest:
            raise ConfigError(
                f"--kv-cache-size is {mebibytes(self.exact_bytes)}, but {left}; lower "
                "--kv-cache-size or --max-batch-tokens"
            )
        return pages

    def _check(self, pages: int, why: str, remedy: str) -> None:
        if pages >= self.needed:
            return
        raise ConfigError(
            f"a prompt of --max-model-len {self.max_model_len} needs {self.needed * self.size} "
            f"tokens of KV cache, {mebibytes(self.needed * self.page_bytes)}, "
            f"{pages * self.size} are available{f' ({why})' if why else ''}; "
            f"lower --max-model-len{remedy or ' or --max-batch-tokens'}"
        )


def measure(memory: Memory, run: Run) -> MeasuredMemory:
    """What is free, and by how much `run`, the largest batches, exceeds what is in use now."""
    memory.trim()
    free = memory.free()
    peak = memory.growth(run)
    memory.trim()
    guess = int(free * UNMEASURED)
    return MeasuredMemory(free, guess if peak is None else peak, estimated=peak is None)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
