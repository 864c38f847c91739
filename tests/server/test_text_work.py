"""Promise: text work takes turns between tenants, and work that was given up ends at once."""

import threading
from concurrent.futures import Future

import pytest

from gpuscore.errors import DeadlineExceeded
from gpuscore.server import text_work
from gpuscore.server.text_work import BEGUN_OF_TENANT, TURN, TextScheduler, permits_here
from gpuscore.text.boundaries import announce

PERMITS = 2
WAIT = 20  # seconds, at most
SOON = 10  # seconds; well before the work gives up waiting for the test


@pytest.fixture
def work():
    scheduler = TextScheduler(permits=PERMITS)
    yield scheduler
    scheduler.close()


class Long:
    """Work of many pieces; each waits until the test lets it go on."""

    def __init__(self, size=TURN):
        self.size, self.pieces, self.ended = size, 0, threading.Event()
        self._begun, self._go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self):
        try:
            while True:
                announce(self.size)
                self.pieces += 1
                self._begun.release()
                assert self._go.acquire(timeout=WAIT)
        finally:
            self.ended.set()

    def at_work(self):
        return self._begun.acquire(timeout=WAIT)

    def begins_nothing(self):
        return not self._begun.acquire(timeout=0.1)

    def go_on(self):
        self._go.release()


def submit(work, tenant, function, large=False):
    """Return the job and a future of its result."""
    future = Future()

    def done(result, error):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    return work.submit(tenant, function, done, large), future


def busy(work, count=PERMITS, size=TURN, tenant="a"):
    """Return jobs of one tenant that have begun their first pieces."""
    jobs = []
    for _ in range(count):
        long = Long(size)
        job, _ = submit(work, tenant, long)
        assert long.at_work()
        jobs.append((long, job))
    return jobs


def end(work, jobs):
    for long, job in jobs:
        work.give_up(job)
        for _ in range(3):
            long.go_on()


def test_a_short_text_waits_for_one_piece(work):
    jobs = busy(work)
    _, done = submit(work, "b", lambda: announce(5) or "answer")
    assert not done.done()
    jobs[0][0].go_on()
    assert done.result(SOON) == "answer"
    assert jobs[0][0].at_work(), "then it goes on"
    assert [long.pieces for long, _ in jobs] == [2, 1]
    end(work, jobs)


def test_a_short_text_of_the_same_tenant_waits_for_one_piece(work):
    jobs = busy(work)
    _, done = submit(work, "a", lambda: "answer")
    jobs[1][0].go_on()
    assert done.result(SOON) == "answer"
    end(work, jobs)


def test_a_tenant_without_running_work_is_next(work):
    """A tenant without running work comes first, however long another tenant's jobs have waited."""
    jobs = busy(work)
    more = [submit(work, "a", lambda: announce(1)) for _ in range(50)]
    order = []
    _, done = submit(work, "b", lambda: order.append([f.done() for _, f in more]))
    jobs[0][0].go_on()
    done.result(SOON)
    assert order == [[False] * 50]
    end(work, jobs)


def test_a_long_job_keeps_its_permit_while_no_other_waits(work):
    (long, job), *_ = jobs = busy(work, 1)
    for pieces in range(2, 6):
        long.go_on()
        assert long.at_work()
        assert long.pieces == pieces
    end(work, jobs)


def test_long_texts_leave_a_permit(work):
    jobs = busy(work, 1, TURN + 1)
    other = Long(TURN + 1)
    jobs.append((other, submit(work, "c", other)[0]))
    assert other.begins_nothing()
    for _ in range(20):  # they use the other permit
        _, done = submit(work, "b", lambda: "answer")
        assert done.result(SOON) == "answer"
    for _ in range(2):
        jobs[0][0].go_on()
    assert other.at_work(), "they take turns"
    end(work, jobs)


def test_a_text_becomes_long_after_its_first_turn(work):
    """Two begin together; the second one's next piece waits, though nobody else needs a permit."""
    (first, first_job), (second, second_job) = jobs = busy(work)
    first.go_on()
    assert first.at_work()
    second.go_on()
    assert second.begins_nothing()
    _, done = submit(work, "b", lambda: announce(TURN) or "answer")
    assert done.result(SOON) == "answer"
    assert (first_job.long, second_job.long) == (True, True)
    first.go_on()
    assert second.at_work()
    end(work, jobs)


@pytest.mark.parametrize(("cores", "permits"), [(1, 2), (2, 2), (3, 2), (4, 3), (64, 3)])
def test_small_machines_have_one_permit_less(cores, permits, monkeypatch):
    monkeypatch.setattr(text_work.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert permits_here() == permits


def test_given_up_before_its_turn(work):
    jobs = busy(work)
    begun = threading.Event()
    job, future = submit(work, "b", lambda: begun.set())
    work.give_up(job)
    assert isinstance(future.exception(SOON), DeadlineExceeded)
    assert not work.waiting
    end(work, jobs)
    assert not begun.is_set()


def test_given_up_at_work_ends_before_the_next_piece(work):
    (long, job), *_ = busy(work, 1)
    work.give_up(job)
    long.go_on()
    assert long.ended.wait(WAIT)
    assert long.pieces == 1


def test_given_up_while_it_waits_ends_at_once(work):
    jobs = busy(work, 1, TURN + 1)
    other = Long(TURN + 1)
    job, future = submit(work, "c", other)
    assert other.begins_nothing()
    work.give_up(job)
    with pytest.raises(DeadlineExceeded):
        future.result(SOON)
    assert other.pieces == 0
    end(work, jobs)


def test_threads_are_bounded_and_end(work):
    before = threading.active_count()
    longs = [Long() for _ in range(3 * BEGUN_OF_TENANT)]
    jobs = [(long, submit(work, "a", long)[0]) for long in longs]
    for _ in range(10):
        for long in longs:
            long.go_on()
    assert threading.active_count() - before <= BEGUN_OF_TENANT
    end(work, jobs)
    for thread in threading.enumerate():
        if thread.name == "text":
            thread.join(WAIT)
    assert threading.active_count() <= before


def test_errors_and_order(work):
    def fails():
        raise ValueError("no")

    _, failed = submit(work, "a", fails)
    with pytest.raises(ValueError, match="no"):
        failed.result(SOON)
    results = [submit(work, str(i % 7), lambda i=i: i)[1] for i in range(500)]
    assert [future.result(SOON) for future in results] == [*range(500)]


def test_close_gives_up_everything():
    work = TextScheduler(permits=PERMITS)
    jobs = busy(work)
    _, waiting = submit(work, "b", lambda: None)
    work.close()
    assert isinstance(waiting.exception(SOON), DeadlineExceeded)
    for long, _ in jobs:
        long.go_on()
        assert long.ended.wait(WAIT)
