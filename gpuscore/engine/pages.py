"""Which KV pages are free. Pages are numbered here and stored by the backend."""

import numpy as np

from gpuscore.types import Int32Array


class PagePool:
    """Hands out page numbers; every page is either free or held by exactly one holder."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._held = np.zeros(num_pages, dtype=bool)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> Int32Array | None:
        """`count` pages, or None (and nothing taken) if fewer are free."""
        if count > len(self._free):
            return None
        pages = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        self._held[pages] = True
        return pages

    def free(self, pages: Int32Array) -> None:
        """Give pages back; raises ValueError for a page that is not held."""
        if not self._held[pages].all() or len(set(pages.tolist())) != len(pages):
            raise ValueError(f"pages {pages.tolist()} are not all held")
        self._held[pages] = False
        self._free.extend(pages.tolist())

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free and held pages together are all pages, each once."""
        free = sorted(self._free)
        held = np.flatnonzero(self._held).tolist()
        if sorted(free + held) != list(range(self.num_pages)):
            raise RuntimeError(f"{len(free)} free and {len(held)} held of {self.num_pages} pages")
