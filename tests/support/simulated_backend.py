"""A backend of a simulated world, which keeps triples of tenant, position and token."""

import zlib
from dataclasses import replace

import numpy as np

from gpuscore.backends.base import OutOfMemory
from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores, lineage

GARBAGE = -9  # what a failed batch leaves in the pages that it should have written
LSE, TOP_ID, TOP_LOGIT = -1, -2, -3  # used as labels


def triples(tenant: int, start: int, tokens: np.ndarray) -> np.ndarray:
    """Return [n, 3]: tenant, position, token."""
    out = np.empty((len(tokens), 3), np.int32)
    out[:, 0], out[:, 1], out[:, 2] = tenant, np.arange(start, start + len(tokens)), tokens
    return out


def hashed(state: int, label: int) -> np.float32:
    return np.float32(zlib.crc32(label.to_bytes(4, "little", signed=True), state) % 99991)


class SimulatedBackend:
    """A backend that runs a batch at its launch and shows the result, or the failure, at
    `collect`."""

    GARBAGE = np.full((1, 3), GARBAGE, np.int32)
    layers_done = 0

    def __init__(
        self, rng: np.random.Generator, faults: dict[str, float], num_states: int = 0
    ) -> None:
        size = int(rng.choice([1, 2, 4]))
        most = int(rng.choice([5, 17, 40]))
        self.limits = BackendLimits(
            max_tokens=most,
            deterministic_chunk=min(most // size, int(rng.choice([0, 0, 1, 3]))) * size,
            page_size=size,
            num_pages=int(rng.integers(100, 200)) // size,
            max_model_len=90,
            vocab_rows=1000,
        )
        if num_states:
            self.limits = replace(self.limits, num_states=num_states, deterministic_chunk=0)
        self.states = [self.GARBAGE] * num_states  # the triples that each is made of
        self.rng, self.faults = rng, faults
        self.slots = np.full((self.limits.num_pages * size, 3), -7, np.int32)
        self.tenants: list[int] = []  # of the next batch's prefixes
        self.poison: set[int] = set()  # prompts that always get a row that is not finite
        self.seen_faults: set[str] = set()

    def strikes(self, fault: str) -> bool:
        if self.rng.random() < self.faults.get(fault, 0):
            self.seen_faults.add(fault)
            return True
        return False

    def extend(self, batch: PackedBatch) -> RowScores | Exception:
        if self.strikes("launch"):
            raise OutOfMemory("simulated, at the launch")
        error: Exception | None = None
        if self.strikes("memory"):
            error = OutOfMemory("simulated")
        elif self.strikes("crash"):
            error = RuntimeError("simulated")
        assert batch.num_tokens <= self.limits.max_tokens, "over the token budget"
        kept = batch.slot_mapping >= 0
        assert len(np.unique(batch.slot_mapping[kept])) == kept.sum(), "two tokens in one slot"
        rows = self._rows(batch)
        slots = batch.state_slots.tolist()
        assert len(set(slots)) == len(slots), "two states in one slot"
        if error is not None:
            self.slots[batch.slot_mapping[kept]] = GARBAGE
            for slot in slots:
                self.states[slot] = self.GARBAGE
            return error
        scores = self._scores(batch, rows)  # reads before it writes
        ends = [self._seen(batch, rows, int(row)) for row in batch.state_rows]
        self.slots[batch.slot_mapping[kept]] = rows[kept]
        for slot, seen in zip(slots, ends, strict=True):
            self.states[slot] = seen
        return scores

    def collect(self, pending: RowScores | Exception) -> RowScores:
        if isinstance(pending, Exception):
            raise pending
        return pending

    def _rows(self, batch: PackedBatch) -> np.ndarray:
        tenant = np.array(self.tenants, np.int32)[batch.request_of]
        of_row = np.repeat(tenant, np.diff(batch.cu_seqlens))
        return np.stack([of_row, batch.positions, batch.token_ids], axis=1).astype(np.int32)

    def _scores(self, batch: PackedBatch, rows: np.ndarray) -> RowScores:
        logits, lse, top_ids, top_logits = [], [], [], []
        for index, row in enumerate(batch.score_rows):
            state = zlib.crc32(self._seen(batch, rows, int(row)).tobytes())
            first, last = batch.cu_labels[index : index + 2]
            values = [hashed(state, int(label)) for label in batch.label_token_ids[first:last]]
            if state in self.poison or self.strikes("nan"):
                values[-1] = np.float32(np.nan)
            logits += values
            lse.append(hashed(state, LSE))
            ranks = range(batch.num_top)
            top_ids.append([hashed(state, TOP_ID - 2 * rank) for rank in ranks])
            top_logits.append([hashed(state, TOP_LOGIT - 2 * rank) for rank in ranks])
        shape = (len(lse), batch.num_top)
        tops = (
            np.array(top_ids, np.int32).reshape(shape),
            np.array(top_logits, np.float32).reshape(shape),
        )
        none = (None, None)
        values, lse = np.array(logits, np.float32), np.array(lse, np.float32)
        return RowScores(values, lse, *(tops if batch.num_top else none))

    def _seen(self, batch: PackedBatch, rows: np.ndarray, row: int) -> np.ndarray:
        """Return the triples that a row reads back, from pages and, if there are any, states."""
        segment = int(np.searchsorted(batch.cu_seqlens[1:], row, side="right"))
        request, size = batch.request_of[segment], self.limits.page_size
        index = np.arange(batch.prefix_lens[request])
        cached = self.slots[batch.page_table[request, index // size] * size + index % size]
        state = [cached[:0], *self.states][batch.prefix_states[request] + 1]
        if self.states and not np.array_equal(cached, state):
            cached = self.GARBAGE
        bounds = batch.cu_seqlens
        shared = [rows[bounds[s] : bounds[s + 1]] for s in lineage(batch, segment)]
        return np.concatenate([cached, *shared, rows[bounds[segment] : row + 1]])
