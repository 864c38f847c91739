"""KV pages: which are free, in use, or only kept because their content may be wanted again.

    free -- allocate --> used -- release --> free, or cached if it was published
                           ^                   |
                           +------ find -------+       cached pages are evicted least recently
                                                       used first when no page is free

Only full pages of queries are published, under a chain of SHA-256 digests over (identity of the
model, salt of the tenant, tokens before the page, tokens of the page); a shorter prefix is
not kept. Pages are numbered here and stored by the backend.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscore.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class PageKey:
    """What a page holds: its own tokens, and the digest of all tokens up to its end."""

    digest: bytes
    tokens: bytes  # compared on a hit, so that a collision of digests is a miss


def page_keys(identity: str, salt: str, tokens: Int32Array, page_size: int) -> Iterator[PageKey]:
    """The keys of the full pages of a token sequence, from its start, made one at a time."""
    digest = hashlib.sha256(f"{identity}\0{salt}".encode()).digest()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        own = np.ascontiguousarray(tokens[start : start + page_size], dtype="<i4").tobytes()
        digest = hashlib.sha256(digest + own).digest()
        yield PageKey(digest, own)


class PagePool:
    """Counts the references to every page and finds pages by what they hold; single-threaded."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evicted = 0  # so far
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = np.zeros(num_pages, dtype=np.int64)
        self._page_of: dict[bytes, int] = {}  # digest -> published page
        self._key_of: dict[int, PageKey] = {}  # published page -> its key
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages, next to evict first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """The pages that hold the longest known start of a sequence; the caller now uses them."""
        found = []
        for key in keys:
            page = self._page_of.get(key.digest)
            if page is None or self._key_of[page].tokens != key.tokens:
                break
            found.append(page)
            self._references[page] += 1
            self._idle.pop(page, None)
        return found

    def allocate(self, count: int) -> Int32Array | None:
        """`count` pages, evicting where needed; None, and nothing changed, if too few are left."""
        if count > self.num_free + self.num_cached:
            return None
        self.evict(count - self.num_free)
        pages = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        self._references[pages] = 1
        return pages

    def release(self, pages: Sequence[int] | Int32Array) -> None:
        """Stop using pages; raises ValueError for one that is not used.

        Later pages of a sequence become evictable before earlier ones, without which they could
        not be found.
        """
        for page in reversed([int(p) for p in pages]):
            if self._references[page] < 1:
                raise ValueError(f"page {page} is not in use")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: PageKey) -> None:
        """Let others find a used page; nothing happens if another page holds the same."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is not in use")
        if key.digest not in self._page_of and page not in self._key_of:
            self._page_of[key.digest] = page
            self._key_of[page] = key

    def evict(self, count: int) -> None:
        """Free up to `count` cached pages, the least recently used first."""
        for _ in range(min(count, len(self._idle))):
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page).digest]
            self._free.append(page)
            self.evicted += 1

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free, cached and used pages are all pages, each once."""
        used = np.flatnonzero(self._references).tolist()
        together = sorted([*self._free, *self._idle, *used])
        if together != list(range(self.num_pages)):
            raise RuntimeError(
                f"{len(self._free)} free, {len(self._idle)} cached and {len(used)} used of "
                f"{self.num_pages} pages"
            )
        if {page: key.digest for page, key in self._key_of.items()} != {
            page: digest for digest, page in self._page_of.items()
        } or set(self._idle) - set(self._key_of):
            raise RuntimeError("the index of published pages is inconsistent")
