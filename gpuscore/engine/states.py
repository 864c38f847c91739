"""Slots for the states of models with linear layers: which a request has, and which are cached.

A request writes the state after each chunk of its query into a slot of its own, where the next
chunk and the items find it. A long item has another slot. A chunk overwrites the state that it
began with. So a rescheduled query begins again with the request's first state, which is zeros or a
shared cached state.

At some boundaries of full pages a query's state is kept in another slot, which is published under
the key of the page that ends there. A cached query can be used up to such a boundary only.
"""

from dataclasses import dataclass, field

from gpuscore.engine.pages import PageKey, PagePool
from gpuscore.types.batch import BackendLimits

MIN_SPACING = 512  # least number of tokens between the states of one query that are cached
MAX_KEPT = 8  # most states of one query that are cached
RESERVE = 4  # they get slots only while over 1/RESERVE of all slots are free or cached


@dataclass(slots=True)
class JobStates:
    """The slots of one request's states; -1 = none."""

    cached: int = -1  # after the query tokens that were cached; shared
    query: int = -1  # after the query's last chunk
    item: int = -1  # after the long item's last chunk
    kept: dict[int, int] = field(default_factory=dict)  # of the query, by number of tokens

    @property
    def slots(self) -> list[int]:
        return [slot for slot in (self.cached, self.query, self.item) if slot >= 0] + [
            *self.kept.values()
        ]


class StateSlots(PagePool):
    """Reference counts of all slots, and an index of states by the page that ends at each."""

    def __init__(self, limits: BackendLimits, prefix_cache: bool) -> None:
        super().__init__(limits.num_states)
        self._page_size = limits.page_size
        self._prefix_cache = prefix_cache

    def find_last(self, keys: tuple[PageKey, ...], pages: int) -> tuple[int, int]:
        """Find the last state at the end of one of the first `pages` pages.

        Returns:
            The number of pages up to there, and the slot, with a reference taken; (0, -1) if there
            is none.
        """
        for count in range(pages, 0, -1):
            if slots := self.find([keys[count - 1]])[0]:
                return count, slots[0]
        return 0, -1

    def take(
        self, states: JobStates, cached_tokens: int, query_length: int, shared_length: int | None
    ) -> bool:
        """Give a request the slots that it needs, and some for the cache if many are free.

        Args:
            states: the request's states, with the slot of the cached one if there is one.
            cached_tokens: number of query tokens that were cached.
            query_length: number of query tokens.
            shared_length: number of query tokens whose pages its long items share; None = it has no
                long item.

        Returns:
            False if too few slots are free or cached; then it got none.
        """
        computes_query = query_length > cached_tokens
        # Long items begin with the state after `shared_length` tokens, which may be the cached one.
        keeps_shared = shared_length is not None and shared_length > cached_tokens
        allocated = self.allocate(computes_query + (shared_length is not None) + keeps_shared)
        if allocated is None:
            return False
        free = allocated.tolist()
        if computes_query:
            states.query = free.pop()
        if shared_length is not None:
            states.item = free.pop()
            if keeps_shared:
                states.kept[shared_length] = free.pop()
        if not self._prefix_cache:
            return True
        for tokens in self._boundaries(cached_tokens, query_length):
            if RESERVE * (self.num_free + self.num_cached) <= self.num_pages:
                break
            if tokens not in states.kept and (slots := self.allocate(1)) is not None:
                states.kept[tokens] = int(slots[0])
        return True

    def _boundaries(self, cached_tokens: int, query_length: int) -> list[int]:
        """Return after how many query tokens a state is worth a slot, the best first."""
        last = query_length // self._page_size * self._page_size
        spacing = MIN_SPACING
        while last - cached_tokens > (MAX_KEPT - 1) * spacing:
            spacing *= 2
        first = (cached_tokens // spacing + 1) * spacing
        spaced = [tokens for tokens in range(first, last, spacing) if tokens % self._page_size == 0]
        return ([last] if last > cached_tokens else []) + spaced[::-1]
