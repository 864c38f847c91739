"""Promise: whatever fails, in whatever order, every request is answered: rightly or with its error.

SIMULATED_SEEDS=100000 in the environment runs more; a seed that fails here fails the same way every
time.
"""

import logging
import os
from collections import Counter
from dataclasses import replace

import pytest

from gpuscore.engine import jobs, plan, scheduler, states
from gpuscore.engine.jobs import ScheduledChunk
from gpuscore.engine.pages import PagePool, PageRows
from gpuscore.engine.plan import Plan
from gpuscore.engine.scheduler import Scheduler
from gpuscore.engine.states import StateSlots
from gpuscore.engine.ticket import Ticket
from support.simulation import simulate
from support.slow import slow

SEEDS = int(os.environ.get("SIMULATED_SEEDS", "700"))
BLOCK = 50


@pytest.fixture(autouse=True)
def quiet():
    """Silence the engine's log: every simulated failure would be logged with its traceback."""
    logger = logging.getLogger("gpuscore.engine.runner")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("first", [0, *slow(*range(BLOCK, SEEDS, BLOCK))])
def test_simulated_worlds(first):
    for seed in range(first, min(first + BLOCK, SEEDS)):
        try:
            simulate(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def simulate_states(*seeds):
    """Run worlds with few slots, for which requests wait, or with many, most of them cached."""
    for seed in seeds:
        try:
            simulate(seed, num_states=4 + 36 * (seed % 2))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.fixture
def close_states(monkeypatch):
    """Keep states in the middle of the worlds' queries, which are short."""
    monkeypatch.setattr(states, "MIN_SPACING", 4)


@pytest.mark.parametrize("first", [0, *slow(*range(BLOCK, SEEDS, BLOCK))])
def test_simulated_worlds_with_states(first, close_states):
    simulate_states(*range(first, min(first + BLOCK, SEEDS)))


def all_of_them(*seeds):
    for seed in seeds:
        simulate(seed)


def test_a_seed_replays_exactly():
    for seed in (5, 7):
        first, second = simulate(seed), simulate(seed)
        assert [t.future.cancelled() or repr(t.future.exception()) for t in first.tickets] == [
            t.future.cancelled() or repr(t.future.exception()) for t in second.tickets
        ]
        assert (first.backend.slots == second.backend.slots).all()


def rescheduled_chunks(job):
    """Return the chunks of long items that rescheduling a job now would undo, in order."""
    return [chunk.long for chunk in job.in_flight if chunk.valid and chunk.long]


def test_the_worlds_hold_failing_chunks_of_long_items(monkeypatch):
    """The worlds contain an item that resumes at the failed chunk, and one whose pages the next
    item has overwritten."""
    reschedule = Scheduler.reschedule
    seen = Counter()

    def counted(self, job):
        chunks = rescheduled_chunks(job)
        if chunks and chunks[0].start > job.shared_length:
            seen["overwritten" if chunks[0].item != chunks[-1].item else "goes on"] += 1
        reschedule(self, job)

    monkeypatch.setattr(Scheduler, "reschedule", counted)
    for seed in range(500):
        if seed % 3:  # every third seed has no faults
            simulate(seed)
        if seen["goes on"] >= 3 and seen["overwritten"] >= 1:
            return
    raise AssertionError(seen)


def shared_before_collect(monkeypatch):
    allocate = Scheduler.allocate

    def early(self, job):
        allocated = allocate(self, job)
        if allocated:
            self.publish(job, job.query_length)
        return allocated

    monkeypatch.setattr(Scheduler, "allocate", early)


def a_reference_is_lost(monkeypatch):
    find = PagePool.find

    def forgetful(self, *args):
        pages, rows = find(self, *args)
        self.release(pages[-1:])
        return pages, rows

    monkeypatch.setattr(PagePool, "find", forgetful)


def a_stale_page_is_found(monkeypatch):
    """A page that has been evicted and filled again is found by the key that it had before."""
    find, publish = PagePool.find, PagePool.publish
    page_of, key_of = {}, {}  # of all pools

    def noting(self, page, key, rows=None):
        page_of[self, key.digest] = page
        key_of[self, page] = key
        publish(self, page, key, rows)

    def stale_find(self, keys, request):
        pages, rows = find(self, keys, request)
        page = page_of.get((self, keys[0].digest)) if keys and not pages else None
        if page is None or key_of[self, page] == keys[0]:
            return pages, rows
        return find(self, [key_of[self, page]])

    monkeypatch.setattr(PagePool, "publish", noting)
    monkeypatch.setattr(PagePool, "find", stale_find)


def the_wrong_parent(monkeypatch):
    pack = jobs.pack_columns

    def first_parent(segments, prefixes, **options):
        segments.parent = [min(parent, 0) for parent in segments.parent]
        return pack(segments, prefixes, **options)

    monkeypatch.setattr(jobs, "pack_columns", first_parent)


def tenants_share_pages(monkeypatch):
    keys = scheduler.page_keys
    monkeypatch.setattr(scheduler, "page_keys", lambda identity, salt, *a: keys(identity, "", *a))


def what_ran_meanwhile_counts(monkeypatch):
    """Accept the result of a batch that read the pages of a failed one."""
    reschedule = Scheduler.reschedule

    def without_epoch(self, job):
        reschedule(self, job)
        job.epoch -= 1

    monkeypatch.setattr(Scheduler, "reschedule", without_epoch)


def the_failed_chunk_of_a_long_item_is_left_out(monkeypatch):
    """Reschedule, but not far enough."""
    reschedule = Scheduler.reschedule

    def too_late(self, job):
        chunks = rescheduled_chunks(job)
        reschedule(self, job)
        if chunks and not job.removed and chunks[0].item == chunks[-1].item:
            job.long_scheduled = chunks[0].stop

    monkeypatch.setattr(Scheduler, "reschedule", too_late)


def pages_that_the_next_long_item_took_are_believed(monkeypatch):
    reschedule = Scheduler.reschedule

    def trusting(self, job):
        chunks = rescheduled_chunks(job)
        reschedule(self, job)
        if chunks:
            job.long_scheduled = chunks[0].start

    monkeypatch.setattr(Scheduler, "reschedule", trusting)


def rows_of_a_later_chunk_land_at_the_start(monkeypatch):
    spans = ScheduledChunk.spans.fget
    moved = property(lambda self: [(item, 0, count) for item, _, count in spans(self)])
    monkeypatch.setattr(ScheduledChunk, "spans", moved)


def rows_that_come_twice_count_twice(monkeypatch):
    def arrive(self, places):
        self.rows_left -= len(places)

    monkeypatch.setattr(Ticket, "mark_arrived", arrive)


def a_chunk_that_was_not_finite_is_left_out(monkeypatch):
    retry_chunk = Scheduler.retry_chunk

    def too_late(self, chunk):
        retry_chunk(self, chunk)
        if chunk.long is not None:
            chunk.job.long_scheduled = chunk.long.stop

    monkeypatch.setattr(Scheduler, "retry_chunk", too_late)


def a_chunk_of_a_query_that_was_not_finite_is_left_out(monkeypatch):
    retry_chunk = Scheduler.retry_chunk

    def too_late(self, chunk):
        retry_chunk(self, chunk)
        if chunk.long is None:
            chunk.job.query_scheduled = chunk.query[1]

    monkeypatch.setattr(Scheduler, "retry_chunk", too_late)


def pages_without_rows_are_enough(monkeypatch):
    """A scored query's pages are found as any other query's."""
    find = PagePool.find

    def any_pages(self, keys, request):
        with_rows, kept = find(self, keys, request)
        self.release(with_rows)
        return find(self, keys)[0], kept

    monkeypatch.setattr(PagePool, "find", any_pages)


def kept_rows_are_for_any_label(monkeypatch):
    monkeypatch.setattr(PageRows, "answer", lambda self, *_: True)


def kept_rows_stay_one_row_behind(monkeypatch):
    rows = Ticket.query_rows

    def late(self, start, stop):
        before = max(0, start - 1)
        own, moved = rows(self, start, stop), rows(self, before, before + stop - start)
        if own is None or moved is None or len(own.logits) != len(moved.logits):
            return own
        return replace(own, logits=moved.logits, lse=moved.lse)

    monkeypatch.setattr(Ticket, "query_rows", late)


def rows_of_a_beginning_go_to_one_item_only(monkeypatch):
    rows_of = Plan.rows_of
    monkeypatch.setattr(Plan, "rows_of", lambda self, item: rows_of(self, item)[:1])


def beginnings_with_other_labels_are_shared(monkeypatch):
    """The last token of what prompts share is shared, too, although they go on differently."""
    common = plan.common_prefix
    monkeypatch.setattr(plan, "common_prefix", lambda tokens, other: common(tokens, other) + 1)


# Each plant with the first seed that finds it, which is tried first. When the worlds change,
# another seed may be the first.
PLANTS = {
    shared_before_collect: 5,
    a_reference_is_lost: 0,
    a_stale_page_is_found: 195,
    the_wrong_parent: 0,
    tenants_share_pages: 0,
    what_ran_meanwhile_counts: 122,
    the_failed_chunk_of_a_long_item_is_left_out: 67,
    pages_that_the_next_long_item_took_are_believed: 671,
    rows_of_a_later_chunk_land_at_the_start: 9,
    rows_that_come_twice_count_twice: 38,
    a_chunk_that_was_not_finite_is_left_out: 389,
    a_chunk_of_a_query_that_was_not_finite_is_left_out: 14,
    pages_without_rows_are_enough: 9,
    kept_rows_are_for_any_label: 69,
    kept_rows_stay_one_row_behind: 69,
    rows_of_a_beginning_go_to_one_item_only: 144,
    beginnings_with_other_labels_are_shared: 17,
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  (any failure will do)
        all_of_them(PLANTS[plant], *range(SEEDS))


def a_failed_chunk_goes_on_with_the_state_that_it_overwrote(monkeypatch):
    reschedule = Scheduler.reschedule

    def going_on(self, job):
        starts = [chunk.query[0] for chunk in job.in_flight if chunk.valid]
        reschedule(self, job)
        job.query_scheduled = min([job.query_length, *starts])

    monkeypatch.setattr(Scheduler, "reschedule", going_on)


def a_long_item_goes_on_with_the_state_that_it_overwrote(monkeypatch):
    pages_that_the_next_long_item_took_are_believed(monkeypatch)


def pages_without_a_state_are_used(monkeypatch):
    """Cached pages are used up to the last one, with the state of an earlier one."""
    find_last = StateSlots.find_last

    def all_of_them(self, keys, pages):
        count, slot = find_last(self, keys, pages)
        return (pages if slot >= 0 else count), slot

    monkeypatch.setattr(StateSlots, "find_last", all_of_them)


def a_state_is_found_that_another_request_took(monkeypatch):
    """A slot is published before the batch that fills it."""
    take = StateSlots.take

    def early(self, states, cached, cut, base):
        taken = take(self, states, cached, cut, base)
        if taken and states.kept:
            self.release([*states.kept.values()][-1:])
        return taken

    monkeypatch.setattr(StateSlots, "take", early)


def the_last_state_is_kept_one_chunk_late(monkeypatch):
    kept = jobs.Job.kept_states

    def late(self, start, stop, page_size):
        states = kept(self, start, stop, page_size)
        return [(stop - start, slot) for _, slot in states]

    monkeypatch.setattr(jobs.Job, "kept_states", late)


def items_read_the_state_that_was_found(monkeypatch):
    state = jobs.Job.state_after

    def first(self, tokens):
        cached = -1 if self.states is None else self.states.cached
        return cached if cached >= 0 else state(self, tokens)

    monkeypatch.setattr(jobs.Job, "state_after", first)


# Each plant with the first seed that finds it in the worlds with states.
PLANTS_WITH_STATES = {
    a_failed_chunk_goes_on_with_the_state_that_it_overwrote: 5,
    a_long_item_goes_on_with_the_state_that_it_overwrote: 14,
    pages_without_a_state_are_used: 5,
    a_state_is_found_that_another_request_took: 0,
    the_last_state_is_kept_one_chunk_late: 0,
    items_read_the_state_that_was_found: 5,
}


@pytest.mark.parametrize("plant", PLANTS_WITH_STATES, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_states_is_found(monkeypatch, plant, close_states):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        simulate_states(PLANTS_WITH_STATES[plant], *range(SEEDS))
