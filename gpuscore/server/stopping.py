"""The stop of a server: its signals, the drain, and the lines that it prints then."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import uvicorn

from gpuscore.exits import EXIT_OK, EXIT_SIGNAL
from gpuscore.server.http.address import BACKLOG
from gpuscore.server.http.gate import Gate
from gpuscore.server.http.rounds import Rounds

EVERY = 5.0  # seconds between two lines about the drain
LAST_READS = 2.0  # seconds, once nothing is in flight, for refusing what the kernel has received
LAST_ANSWERS = 1.0  # seconds for writing answers once all are known
FORCED_ANSWERS = 2.0  # seconds after a second signal for refusing all that is in flight
FORCED_EXIT = 3.0  # seconds after a second signal, whatever hangs


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a drain, during which it still listens and answers 503 to new requests.

    uvicorn's own shutdown, which closes the listener, begins once nothing is in flight and no bytes
    or connections of clients wait to be read, or LAST_READS seconds after nothing was in flight.
    Closing a socket with unread bytes resets its connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gate: Gate,
        rounds: Rounds,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self.say = say  # prints a line without blocking
        self._next_line = 0.0  # time of the next line about a drain, at the earliest
        self.service = gate.operations.service
        self._gate = gate
        self.rounds = rounds
        self.exit_code = EXIT_OK
        self._drain_end = self._forced_end = 0.0
        self._last_look = 0.0  # until then, requests that have reached the machine are still read
        self._signal = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # asyncio has set the number that it accepts in a round
        # The loop's runner ends it.
        self._watching = asyncio.create_task(self._gate.operations.watch_loop())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        # With a key file, SIGHUP reloads the keys; under nohup it is ignored.
        has_file = self._gate.config.api_key_file is not None
        if not has_file and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, earlier in before.items():
                signal.signal(number, earlier)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.service.draining:
            self._signal = sig
            self._drain_end = monotonic() + self._gate.config.drain_seconds
            self.service.draining = True  # new requests are refused
        elif not self.force_exit:  # a second signal: do not wait for requests in flight
            self.force_exit = True
            self._forced_end = monotonic() + FORCED_ANSWERS
            timer = threading.Timer(FORCED_EXIT, os._exit, [EXIT_SIGNAL + self._signal])
            timer.daemon = True
            timer.start()

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        return self.service.draining and self._drained()

    def _drained(self) -> bool:
        """Return True if the server may shut down.

        After the drain timeout or a second signal, answer 503 to requests in flight.
        """
        left = self._drain_end - monotonic()
        # Once nothing was in flight, waiting requests are later ones, each of which is refused when
        # it is read. After a second signal there is not enough time to refuse all of them.
        counted = self.force_exit or not self._last_look
        busy = self.service.busy or (counted and len(self._gate.starts) > 0)
        self._say_waiting(max(self._gate.admission.requests, busy), max(0.0, left))
        if busy and not self.force_exit and left > 0:
            return False
        if busy:
            self.exit_code = EXIT_SIGNAL + self._signal
            self.service.abandon()
        self._last_look = self._last_look or monotonic() + LAST_READS
        if self.force_exit:  # uvicorn would not wait until the last answers are written
            unanswered = busy or bool(self.server_state.tasks) or self.rounds.ready
            self.config.timeout_graceful_shutdown = round(LAST_ANSWERS)
            return not unanswered or monotonic() >= self._forced_end
        # uvicorn's shutdown then waits this long for slow clients to take their answers.
        self.config.timeout_graceful_shutdown = round(max(LAST_ANSWERS, left))
        return not self.rounds.ready or monotonic() >= self._last_look

    def _say_waiting(self, requests: int, left: float) -> None:
        """Say at the signal, and every few seconds, how many requests are still in flight."""
        if monotonic() < self._next_line:
            return
        first = not self._next_line
        self._next_line = monotonic() + EVERY
        if requests:
            some = "1 request" if requests == 1 else f"{requests:,} requests"
            self.say(
                f"gpuscore: stopping; waiting for {some} in flight, for at most {left:.0f} s; "
                "a second Ctrl-C or SIGTERM stops at once"
            )
        elif first:
            self.say("gpuscore: stopping; no request is in flight")
