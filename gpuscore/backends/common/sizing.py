"""The number of KV pages: a fraction of the memory left by weights and the largest batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from gpuscore.backends.common.memory import Memory
from gpuscore.errors import ConfigError

Run: TypeAlias = Callable[[], object]

UNMEASURED = 0.5  # share of free memory kept for the largest batch if its peak is not measurable


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes that were free after loading the weights, and bytes that the largest batch took."""

    free: int
    batch: int
    estimated: bool  # `batch` is a guess, because the system does not tell


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The rule for the number of pages, to be applied once free memory is known."""

    size: int  # tokens of a page
    page_bytes: int  # over all layers
    max_model_len: int
    needed: int  # pages of one prompt of that length
    most: int | None  # upper bound; None = as many as fit
    fraction: float  # of the memory that is left
    exact_bytes: int | None  # size of all pages; replaces `most` and `fraction`
    spare: int | None = None  # most bytes for pages and the largest batch; None = all that is free

    def count(self, free: int, batch: int) -> int:
        """Return the number of pages.

        Args:
            free: bytes that are left beside the weights.
            batch: bytes of those that the largest batch takes.

        Raises:
            ConfigError: the pages cannot hold one prompt of full length, or `exact_bytes` do not
                fit.
        """
        free, limited = (free, "") if self.spare is None else self._limited(free, self.spare)
        rest = max(0, free - batch)
        left = (
            f"the weights leave {mebibytes(free)}{limited}, the largest batch takes "
            f"{mebibytes(batch)}"
        )
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

    def _limited(self, free: int, spare: int) -> tuple[int, str]:
        return (free, "") if free < spare else (spare, " of --memory-limit")

    def _check(self, pages: int, why: str, remedy: str) -> None:
        if pages >= self.needed:
            return
        raise ConfigError(
            f"a prompt of --max-model-len {self.max_model_len} needs {self.needed * self.size} "
            f"tokens of KV cache, {mebibytes(self.needed * self.page_bytes)}, "
            f"{pages * self.size} are available{f' ({why})' if why else ''}; "
            f"lower --max-model-len{remedy or ' or --max-batch-tokens'}"
        )


def measure(memory: Memory, *parts: Run, spare: int | None = None) -> MeasuredMemory:
    """Measure free memory, and the peak growths during `parts`, which run the largest batches.

    Args:
        memory: of the device.
        parts: run the largest batches.
        spare: the most of it that counts as free.
    """
    memory.trim()
    free = memory.free() if spare is None else min(spare, memory.free())
    peak = memory.growth(*parts)
    memory.trim()
    guess = int(free * UNMEASURED)
    return MeasuredMemory(free, guess if peak is None else peak, estimated=peak is None)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
