"""The pool of KV pages: each page is free, used, or cached for a later request.

    free -- allocate --> used -- release --> free, or cached if it was published
                           ^                   |
                           +------ find -------+       when no page is free, the least recently
                                                       used cached page is evicted

Only full pages of queries are published. A page is found by a chain of SHA-256 digests over (the
model's identity, the tenant's salt, the tokens before the page, the page's tokens). The tokens
after a query's last full page are not cached. The pool numbers the pages; the backend stores them.
If tokens of a query are scored, their results are kept here with its pages.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gpuscore.types.batch import Int32Array, Rows, RowScores
from gpuscore.types.request import ScoreRequest


@dataclass(frozen=True, slots=True)
class PageKey:
    """The key of a page's content: its tokens, and the digest of all tokens up to its end."""

    digest: bytes
    tokens: bytes  # compared on a hit, so that two pages with equal digests are not confused


@dataclass(frozen=True, slots=True)
class PageRows:
    """The results of a page's scored rows."""

    rows: Rows  # of the page
    scores: RowScores

    def answer(self, request: ScoreRequest, start: int, stop: int) -> bool:
        """True if the request needs exactly these results of query tokens [start, stop)."""
        tops = self.scores.top_ids
        count = 0 if tops is None else tops.shape[1]
        if (request.need_lse and self.scores.lse is None) or request.num_top > count:
            return False
        return all(map(np.array_equal, request.query_part(start, stop), self.rows))


# Called with (start, stop): returns the results of these query tokens; None if none is scored.
RowsOf: TypeAlias = Callable[[int, int], PageRows | None]


def page_keys(identity: str, salt: str, tokens: Int32Array, page_size: int) -> Iterator[PageKey]:
    """Yield the keys of a token sequence's full pages, from its start."""
    digest = hashlib.sha256(f"{identity}\0{salt}".encode()).digest()
    content = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    page_bytes = 4 * page_size
    for start in range(0, len(content) - page_bytes + 1, page_bytes):
        page = content[start : start + page_bytes]
        digest = hashlib.sha256(digest + page).digest()
        yield PageKey(digest, page)


class PagePool:
    """Reference counts of all pages, and an index of pages by content; single-threaded."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evicted = 0  # so far
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._page_of: dict[bytes, int] = {}  # digest -> published page
        self._key_of: dict[int, PageKey] = {}  # published page -> its key
        self._rows_of: dict[bytes, PageRows] = {}  # digest of a published page -> its rows' results
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

    def find(
        self, keys: Iterable[PageKey], request: ScoreRequest | None = None
    ) -> tuple[list[int], list[PageRows | None]]:
        """Return the pages of a query's longest cached prefix, and take a reference to each.

        If the request scores rows of a page, the page is found only if it has their results. They
        are returned, too.
        """
        pages: list[int] = []
        cached_rows: list[PageRows | None] = []
        if request is not None and not request.rows_of(-1):
            request = None  # it scores no row of its query
        for key in keys:
            page = self._page_of.get(key.digest)
            if page is None or self._key_of[page].tokens != key.tokens:
                break
            rows = None
            page_size = len(key.tokens) // 4
            start = len(pages) * page_size
            stop = start + page_size
            if request is not None and request.query_part(start, stop):
                rows = self._rows_of.get(key.digest)
                if rows is None or not rows.answer(request, start, stop):
                    break
            cached_rows.append(rows)
            pages.append(page)
            self._references[page] += 1
            self._idle.pop(page, None)
        return pages, cached_rows

    def allocate(self, count: int) -> Int32Array | None:
        """Return `count` pages, evicting cached ones if needed; None if even that is not enough."""
        if count > self.num_free + self.num_cached:
            return None
        self.evict(count - self.num_free)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return np.array(pages, dtype=np.int32)

    def release(self, pages: Sequence[int] | Int32Array) -> None:
        """Drop one reference to each page; raise ValueError for a page that is not in use.

        Later pages of a sequence are evicted before earlier ones, because a page is found only
        through the pages before it.
        """
        for page in reversed(pages.tolist() if isinstance(pages, np.ndarray) else pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} is not in use")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: PageKey, rows: PageRows | None = None) -> None:
        """Add a used page to the index, unless another page has the same content; keep its rows."""
        if self._references[page] < 1:
            raise ValueError(f"page {page} is not in use")
        if key.digest not in self._page_of and page not in self._key_of:
            self._page_of[key.digest] = page
            self._key_of[page] = key
        if rows is not None and key.digest in self._page_of:
            self._rows_of[key.digest] = rows

    def evict(self, count: int) -> None:
        """Free up to `count` cached pages, the least recently used first."""
        for _ in range(min(count, len(self._idle))):
            self._forget(next(iter(self._idle)))
            self.evicted += 1

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Remove the pages with these keys from the index; those in use become free on release."""
        for key in keys:
            if (page := self._page_of.get(key.digest)) is not None:
                self._forget(page)

    def _forget(self, page: int) -> None:
        digest = self._key_of.pop(page).digest
        del self._page_of[digest]
        self._rows_of.pop(digest, None)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each page is exactly one of free, cached and used."""
        used = [page for page, count in enumerate(self._references) if count]
        together = sorted([*self._free, *self._idle, *used])
        if together != list(range(self.num_pages)):
            raise RuntimeError(
                f"{len(self._free)} free, {len(self._idle)} cached and {len(used)} used of "
                f"{self.num_pages} pages"
            )
        if (
            {page: key.digest for page, key in self._key_of.items()}
            != {page: digest for digest, page in self._page_of.items()}
            or set(self._idle) - set(self._key_of)
            or set(self._rows_of) - set(self._page_of)
        ):
            raise RuntimeError("the index of published pages is inconsistent")
