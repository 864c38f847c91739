"""Work on text, in a few threads and in turns, so that nobody's long text holds up the others.

At most `PERMITS` jobs are worked on at a time, each in a thread of its own. Between two pieces of
its text a job hands its permit on if others wait and it has done a turn's worth of work. Permits go
round between tenants, and within a tenant in turns to a job that has begun and to one that has not:
short texts, which end in their first turn, wait for one turn of the long ones beside them and not
for their end.

A piece cannot be interrupted. Where a text has no place to be cut at, one may take seconds; such
large ones never have the last permit, so that a small one always waits for small ones only.

A job that has not begun holds no thread. How many may have begun is bounded, for every tenant and
for all together; a tenant of which fewer have begun is not held up by another's bound.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from typing import Any, Generic, TypeVar

from gpuscore.errors import DeadlineExceeded, Unavailable
from gpuscore.text.pieces import PIECE_CHARS
from gpuscore.text.turns import Turns

ResultT = TypeVar("ResultT")

PERMITS = 2
BEGUN_OF_TENANT, BEGUN = 4, 32  # jobs with a thread, of one tenant and of all
TURN = PIECE_CHARS  # characters of a turn: one piece, or many short texts
LARGE = 4 * PIECE_CHARS  # characters of a piece that never has the last permit
IDLE = 1.0  # seconds after which a thread without work ends


class TextJob(Turns, Generic[ResultT]):
    """One piece of work. All but `before` is the scheduler's."""

    def __init__(self, owner: "TextWork", tenant: str, work: Callable[[Turns], ResultT]) -> None:
        self.tenant = tenant
        self.begun = self.permitted = self.large = self.given_up = False
        self.queue: deque[AnyJob] | None = None  # in which it waits
        self.permit = threading.Semaphore(0)  # released when it is this job's turn
        self.characters = 0  # that the work has looked at so far
        self._done = 0  # of them in this turn
        self._owner = owner
        self._left: tuple[Callable[[Turns], ResultT], Future[ResultT]] | None = (work, Future())

    def before(self, characters: int) -> None:
        """See `Turns`. Costs next to nothing while nobody else waits."""
        self.characters += characters
        self._done += characters
        large = characters > LARGE
        if self.given_up or large or self.large or (self._done > TURN and self._owner.waiting):
            self._owner.next_turn(self, large)
            self._done = characters

    @property
    def future(self) -> Future[ResultT]:
        """Of the result, until the work begins."""
        assert self._left is not None  # noqa: S101  (it has not begun)
        return self._left[1]

    def run(self) -> None:
        """Do the work, in a thread that has a permit."""
        assert self._left is not None  # noqa: S101  (it runs once)
        # An error's traceback knows the frames that know this job, and their texts: if the job knew
        # the future, which has the error, all of it would be there until garbage is collected.
        (work, future), self._left = self._left, None
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(self))
        except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
            future.set_exception(error)
        finally:
            del work, future


AnyJob = TextJob[Any]


class _Tenant:
    """Jobs that wait; how many have begun, and how many of these have a permit."""

    def __init__(self) -> None:
        self.new: deque[AnyJob] = deque()
        self.paused: deque[AnyJob] = deque()
        self.begun = self.permitted = 0
        self.was_new = False  # the job that had the last turn


class TextWork:
    """The scheduler. Safe to call from several threads; nothing but `TextJob.before` waits.

    Args:
        ended: called in a job's thread, once nothing holds its texts any more, with how many
            characters it has looked at and whether it was given up.
    """

    def __init__(self, ended: Callable[[int, bool], None] = lambda *_: None) -> None:
        self._ended = ended
        self.waiting = 0  # jobs that want a turn
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}  # who had a turn last is last
        self._permitted: set[AnyJob] = set()
        self._begun = 0
        self._ready: deque[AnyJob] = deque()  # begun and permitted, for the next free thread
        self._free = 0  # threads without work that no job was meant for
        self._wake = threading.Condition(self._lock)
        self.closed = False

    def submit(
        self, tenant: str, work: Callable[[Turns], ResultT]
    ) -> tuple[TextJob[ResultT], Future[ResultT]]:
        """Begin `work` when it is its turn. It is given turns to ask before every piece."""
        job = TextJob(self, tenant, work)
        future = job.future
        with self._lock:
            if self.closed:
                raise Unavailable("the server is shutting down")
            self._wait(job, self._tenants.setdefault(tenant, _Tenant()).new)
            self._hand_out()
        return job, future

    def give_up(self, job: AnyJob) -> None:
        """Nobody waits for a job any more. One that waits is dropped, one that runs ends before its
        next piece; a job that is done stays as it is."""
        with self._lock:
            self._give_up(job)

    def close(self) -> None:
        """Give up everything; threads end with the piece that they are at."""
        with self._lock:
            self.closed = True
            waiting = [[*tenant.new, *tenant.paused] for tenant in self._tenants.values()]
            for job in [*chain(*waiting), *self._permitted]:
                self._give_up(job)
            self._wake.notify_all()

    def next_turn(self, job: AnyJob, large: bool) -> None:
        """Hand on a running job's permit and wait for its next.

        Args:
            large: whether the next piece is.

        Raises:
            DeadlineExceeded: the job was given up.
        """
        with self._lock:
            if not job.given_up:
                self._take_permit(job)
                job.large = large
                self._wait(job, self._tenants[job.tenant].paused)
                self._hand_out(but=job)
                self._hand_out()
        if not job.given_up:
            job.permit.acquire()
        if job.given_up:
            raise DeadlineExceeded("the request was given up")

    # ---- all that follows holds the lock ----

    def _wait(self, job: AnyJob, queue: deque[AnyJob]) -> None:
        job.queue = queue
        queue.append(job)
        self.waiting += 1

    def _leave(self, job: AnyJob) -> None:
        assert job.queue is not None  # noqa: S101  (it waits)
        job.queue.remove(job)
        job.queue = None
        self.waiting -= 1

    def _take_permit(self, job: AnyJob) -> None:
        if job.permitted:
            job.permitted = False
            self._permitted.remove(job)
            self._tenants[job.tenant].permitted -= 1

    def _give_up(self, job: AnyJob) -> None:
        job.given_up = True
        if job.queue is None:
            return
        self._leave(job)
        if job.begun:
            job.permit.release()  # its thread ends it, without a permit
        else:
            job.future.cancel()
            self._forget(job.tenant)

    def _hand_out(self, but: AnyJob | None = None) -> None:
        """Give free permits to jobs that may have them, other than `but`, which had its turn."""
        while len(self._permitted) < PERMITS and (job := self._next(but)) is not None:
            self._leave(job)
            self._permitted.add(job)
            self._tenants[job.tenant].permitted += 1
            job.permitted = True
            if job.begun:
                job.permit.release()
            else:
                self._begin(job)

    def _next(self, but: AnyJob | None) -> AnyJob | None:
        """Of the tenant with the fewest permits; among these, of whose last turn is longest ago."""
        for name, tenant in sorted(self._tenants.items(), key=lambda pair: pair[1].permitted):
            job = self._next_of(tenant, but)
            if job is not None:
                tenant.was_new = not job.begun
                self._tenants[name] = self._tenants.pop(name)
                return job
        return None

    def _next_of(self, tenant: _Tenant, but: AnyJob | None) -> AnyJob | None:
        """New jobs and those that have begun take turns; each of the two in their own order."""
        room = tenant.begun < BEGUN_OF_TENANT and self._begun < BEGUN
        new = tenant.new[0] if tenant.new and room else None
        no_large = sum(job.large for job in self._permitted) >= PERMITS - 1
        paused = next(
            (job for job in tenant.paused if job is not but and not (job.large and no_large)), None
        )
        return (paused or new) if tenant.was_new else (new or paused)

    def _begin(self, job: AnyJob) -> None:
        job.begun = True
        self._tenants[job.tenant].begun += 1
        self._begun += 1
        self._ready.append(job)
        if self._free:
            self._free -= 1
            self._wake.notify()
            return
        try:
            threading.Thread(target=self._thread, name="text").start()
        except RuntimeError:  # the system has no more
            self._ready.remove(job)
            self._end(job)
            job.future.set_exception(Unavailable("no thread for text", retry_after=1))

    def _end(self, job: AnyJob) -> None:
        self._take_permit(job)
        self._tenants[job.tenant].begun -= 1
        self._begun -= 1
        self._forget(job.tenant)

    def _forget(self, name: str) -> None:
        tenant = self._tenants[name]
        if not (tenant.begun or tenant.new or tenant.paused):
            del self._tenants[name]

    # ---- threads ----

    def _thread(self) -> None:
        while (job := self._take()) is not None:
            job.run()
            with self._lock:
                self._end(job)
                self._free += 1
                self._hand_out()
            seen = job.characters, job.given_up
            del job  # and with it what it holds, while this thread waits
            self._ended(*seen)

    def _take(self) -> AnyJob | None:
        """The next job for this thread; None if it has to end."""
        with self._lock:
            while not self._ready:
                if self.closed or not (self._wake.wait(IDLE) or self._ready):
                    self._free -= 1
                    return None
            return self._ready.popleft()
