"""Text work, done in a few threads and in turns, so that no long text delays the other requests.

A few jobs run at a time, each with a permit. A job is *long* once it has more than one turn's worth
of work. Long jobs never have the last permit. So short texts run beside them, and long texts leave
a part of the machine to everything else. This holds even for a text without a safe split, whose
only piece may take seconds and cannot be interrupted.

Between two pieces a long job passes its permit on if other jobs wait. Permits go round between
tenants. A job that has begun holds a thread, so the number of such jobs is bounded, for each tenant
and for all together.

A body of 16 MiB stops the event loop for some 30 ms, and a text request needs the loop four times
until it is answered. If large bodies were decoded one after the other, a text request would wait
four times for a large body. So one large body is decoded at a time, with a rest after it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

from gpuscore.errors import DeadlineExceeded, GpuscoreError, Unavailable
from gpuscore.text.boundaries import PIECE_CHARS, announced_to

ResultT = TypeVar("ResultT")

PERMITS = 3  # jobs that run at a time; one less on a machine with fewer than MANY_CORES
MANY_CORES = 4
BEGUN_OF_TENANT = 4  # most jobs of one tenant that have a thread
BEGUN = 32  # most jobs of all tenants that have one
TURN = PIECE_CHARS  # characters of a turn: one piece, or many short texts
IDLE = 1.0  # seconds after which a thread without work ends
# After a large body, the next one waits for REST times as long as this one took.
REST = 2
# Called with a job's result or its error, in the job's thread, or in another if it never begins.
Done = Callable[[ResultT | None, BaseException | None], None]


def permits_here() -> int:
    """Return the number of permits for the cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    return PERMITS if cores >= MANY_CORES else PERMITS - 1


class TextJob(Generic[ResultT]):
    """One job of text work, which `before` may pause between two pieces."""

    def __init__(
        self,
        owner: "TextScheduler",
        tenant: str,
        function: Callable[[], ResultT],
        done: Done[ResultT],
        large: bool,
    ) -> None:
        self.tenant = tenant
        self.large = large
        self.begun = self.long = self.given_up = False
        self.permit = threading.Semaphore(0)  # released when this paused job may go on
        self._read = 0  # characters that it has read in this turn
        self._owner = owner
        self._left: tuple[Callable[[], ResultT], Done[ResultT]] | None = (function, done)

    def before(self, characters: int) -> None:
        """Take note of a piece of work (`announce`); costs next to nothing for a short text."""
        self._read += characters
        more = self._read > TURN
        if self.given_up or (more and (self._owner.waiting or not self.long)):
            self._owner.next_turn(self)
            self._read = characters

    def run(self) -> None:
        """Do the work, in a thread that has a permit."""
        # An error's traceback refers to frames that refer to this job and to its texts. If the job
        # still referred to what keeps the error, this circle would keep the texts in memory until
        # the next garbage collection.
        assert self._left is not None  # noqa: S101  (it runs once)
        function, done = self._left
        self._left = None
        try:
            with announced_to(self.before):
                result = function()
        except BaseException as error:  # noqa: BLE001  (passed on)
            done(None, error)
        else:
            done(result, None)
        finally:
            del function, done

    def drop(self, error: GpuscoreError) -> None:
        """End a job that has not begun."""
        assert self._left is not None  # noqa: S101  (it has not begun)
        _, done = self._left
        self._left = None
        done(None, error)


AnyJob = TextJob[Any]


class _Tenant:
    """A tenant's waiting jobs, and the number of its jobs that have begun."""

    def __init__(self) -> None:
        self.new: deque[AnyJob] = deque()
        self.paused: deque[AnyJob] = deque()
        self.begun = 0


class TextScheduler:
    """The scheduler of text work. Safe to call from several threads; only `TextJob.before` waits.

    Args:
        permits: jobs that run at a time, at least 2.
    """

    def __init__(self, permits: int = PERMITS - 1) -> None:
        self._permits = permits
        self.waiting = 0  # jobs that wait for a permit
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}  # in order of their last permits, oldest first
        self._running: set[AnyJob] = set()  # they have a permit
        self._ready: SimpleQueue[AnyJob | None] = SimpleQueue()  # for the next free thread
        self._free = 0  # idle threads, less those that will get a job
        self._begun = 0
        self._large = False  # a large job runs, or the rest after it
        self._closed = threading.Event()

    def submit(
        self, tenant: str, function: Callable[[], ResultT], done: Done[ResultT], large: bool = False
    ) -> TextJob[ResultT]:
        """Queue a function, which must announce every piece (`announce`).

        Args:
            large: the job is large; one large job runs at a time, with a rest after it.

        Raises:
            Unavailable: the server is shutting down.
        """
        job = TextJob(self, tenant, function, done, large=large)
        with self._lock:
            if self._closed.is_set():
                raise Unavailable("the server is shutting down")
            self._tenants.setdefault(tenant, _Tenant()).new.append(job)
            self._hand_out()
        return job

    def give_up(self, job: AnyJob) -> None:
        """Give up a job whose result nobody needs any more.

        A job that has not begun is dropped; one that runs or is paused ends before its next piece;
        one that is done stays as it is.
        """
        with self._lock:
            self._give_up(job)
            self._count()

    def close(self) -> None:
        """Give up all jobs; each thread ends after its current piece."""
        with self._lock:
            self._closed.set()
            waiting = [job for t in self._tenants.values() for job in (*t.new, *t.paused)]
            for job in (*waiting, *self._running):
                self._give_up(job)
            for _ in range(self._free):
                self._ready.put(None)

    def next_turn(self, job: AnyJob) -> None:
        """Pass on the permit of a running long job, and wait until the job gets another one.

        Raises:
            DeadlineExceeded: the job was given up.
        """
        with self._lock:
            if not job.given_up:
                self._running.discard(job)
                job.long = True
                self._tenants[job.tenant].paused.append(job)
                self._hand_out(but=job)
                self._hand_out()
        if not job.given_up:
            job.permit.acquire()
        if job.given_up:
            raise DeadlineExceeded("the request was given up")

    # ---- the methods that follow are called with the lock held ----

    def _count(self) -> None:
        self.waiting = sum(len(t.new) + len(t.paused) for t in self._tenants.values())

    def _give_up(self, job: AnyJob) -> None:
        job.given_up = True
        tenant = self._tenants.get(job.tenant)  # None once all its jobs are done
        if tenant is None or job not in (queue := tenant.paused if job.begun else tenant.new):
            return
        queue.remove(job)
        if job.begun:
            job.permit.release()  # its thread wakes up and ends the job without a permit
        else:
            job.drop(DeadlineExceeded("the request was given up"))
            self._forget(job.tenant)

    def _hand_out(self, but: AnyJob | None = None) -> None:
        """Give free permits to waiting jobs that may have them, except to `but`."""
        while len(self._running) < self._permits and (job := self._next(but)) is not None:
            self._running.add(job)
            self._tenants[job.tenant] = self._tenants.pop(job.tenant)
            if job.begun:
                job.permit.release()
            else:
                self._begin(job)
        self._count()

    def _next(self, but: AnyJob | None) -> AnyJob | None:
        """Take the job that gets the next permit out of its queue.

        The tenant with the fewest permits comes first; among equals, the one whose last permit is
        the oldest. Of a tenant's jobs those that have begun come first.
        """
        permitted = [job.tenant for job in self._running]
        full = sum(job.long for job in self._running) >= self._permits - 1
        for name in sorted(self._tenants, key=permitted.count):
            tenant = self._tenants[name]
            paused = [] if full else [job for job in tenant.paused if job is not but]
            if paused:
                tenant.paused.remove(paused[0])
                return paused[0]
            if tenant.begun < BEGUN_OF_TENANT and self._begun < BEGUN:
                for job in tenant.new:
                    if not (job.large and self._large):
                        tenant.new.remove(job)
                        return job
        return None

    def _begin(self, job: AnyJob) -> None:
        job.begun = True
        self._tenants[job.tenant].begun += 1
        self._begun += 1
        if self._free:
            self._free -= 1
        else:
            try:
                threading.Thread(target=self._thread, name="text").start()
            except RuntimeError:  # the system has no more threads
                self._end(job)
                job.drop(Unavailable("no thread for text", retry_after=1))
                return
        self._large = self._large or job.large
        self._ready.put(job)

    def _end(self, job: AnyJob) -> None:
        self._running.discard(job)
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
            began = monotonic()
            job.run()
            with self._lock:
                self._end(job)
                self._free += not job.large
                self._hand_out()
            if job.large:
                self._closed.wait(REST * (monotonic() - began))
                with self._lock:
                    self._large = False
                    self._free += 1
                    self._hand_out()
            del job  # releases its texts before this thread waits

    def _take(self) -> AnyJob | None:
        """Return the next job for this thread; None if the thread must end."""
        with suppress(Empty):
            return self._ready.get(timeout=0 if self._closed.is_set() else IDLE)
        with self._lock:
            with suppress(Empty):
                return self._ready.get_nowait()  # it came just now
            self._free -= 1
            return None
