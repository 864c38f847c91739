"""The other ranks of a tensor-parallel model: rank 0 starts, feeds and watches their processes."""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from threading import Event, Lock, Thread
from time import monotonic

from gpuscore.backends.base import DeviceLost
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.backends.torch.ranks.messages import BEAT, Kind, frames, send
from gpuscore.config import API_KEY_VARIABLE
from gpuscore.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
CAUSE_SECONDS = 10.0  # how long to wait for a rank to end after an all-reduce failed
MAX_SILENCE = 5.0  # a rank without a heartbeat for so many seconds is killed
CLOSE_SECONDS = 5.0  # how long to wait for a rank to end after its socket was closed


class Peers:
    """Starts all ranks of a model except rank 0. They end on `close`, or when this process ends.

    Args:
        plan: what rank 0 loads; the other ranks make their plans from its settings.
        lost: called once, with a one-line message, when a rank ends unexpectedly.
    """

    def __init__(self, plan: TorchPlan, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._folder = tempfile.TemporaryDirectory(prefix="gpuscore-ranks-")
        self.rendezvous = Path(self._folder.name, "group")
        self.abort: Callable[[], None] = lambda: None  # ends rank 0's wait for the other ranks
        self._lock = Lock()
        self._closing = False
        self._ended = Event()
        self._cause: ConfigError | DeviceLost | None = None
        self._ranks = range(1, plan.shard.ranks)
        self._loaded = {rank: Event() for rank in self._ranks}
        self._silence: dict[int, float] = {}  # seconds since the last heartbeat, by ready rank
        self._sockets: list[socket.socket] = []
        self._processes: list[Popen[bytes]] = []
        settings = asdict(plan.settings)
        start = {"directory": plan.directory, "config": settings, "path": str(self.rendezvous)}
        try:
            for rank in self._ranks:
                self._start(rank, json.dumps(start | {"rank": rank}).encode(), plan.device.type)
        except BaseException:
            self.close()
            raise
        Thread(target=self._kill_silent, name="silent-ranks", daemon=True).start()

    def wait_loaded(self) -> None:
        """Wait until every rank has read its weights.

        Raises:
            ConfigError: a rank refuses the model.
            DeviceLost: a rank has ended.
        """
        for loaded in self._loaded.values():
            loaded.wait()
        if self._ended.is_set():
            raise self.cause()

    def delete_rendezvous(self) -> None:
        """Delete the file through which the ranks found each other."""
        self._folder.cleanup()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a frame to every rank; raise DeviceLost if one has ended."""
        if self._ended.is_set():
            raise self.cause()
        try:
            for sock in self._sockets:
                send(sock, kind, body)
        except OSError as error:
            raise self.cause() from error

    def cause(self) -> ConfigError | DeviceLost:
        """Wait up to CAUSE_SECONDS for a rank to end; return the error of the first that ended."""
        self._ended.wait(CAUSE_SECONDS)
        return self._cause or DeviceLost("the ranks cannot reach each other")

    def close(self) -> None:
        """End all ranks and wait for them."""
        with self._lock:
            self._closing = True
        for sock in self._sockets:
            with suppress(OSError):  # its other end may be gone
                sock.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except TimeoutExpired:
                process.kill()
                process.wait()
        for sock in self._sockets:
            sock.close()
        self._folder.cleanup()

    def _start(self, rank: int, start: bytes, device: str) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs:
            process = Popen(
                [sys.executable, "-P", "-m", "gpuscore.backends.torch.ranks", str(theirs.fileno())],
                stdin=DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(rank, device),
            )
        self._processes.append(process)
        with suppress(OSError):  # it has ended already, which `_watch` sees
            send(ours, Kind.START, start)
        watch = Thread(target=self._watch, args=(rank, ours, process), name=f"rank-{rank}")
        watch.daemon = True
        watch.start()

    def _watch(self, rank: int, sock: socket.socket, process: Popen[bytes]) -> None:
        refused = failed = ""
        with suppress(OSError):  # it was killed while it sent
            for kind, body in frames(sock):
                match kind:
                    case Kind.LOADED:
                        self._loaded[rank].set()
                    case Kind.ALIVE:
                        self._silence[rank] = 0.0
                    case Kind.REFUSED:
                        refused = body.decode()
                    case Kind.FAILED:
                        failed = body.decode()
        code = process.wait()
        ending = f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._silence.get(rank, 0.0) > MAX_SILENCE:
            ending = f"gave no sign of life for {MAX_SILENCE:g} seconds"
        name = f"rank {rank} of {len(self._ranks) + 1} (process {process.pid})"
        line = f"{name} {f'failed: {failed}' if failed else ending}; this replica ends"
        self._end(ConfigError(refused) if refused else DeviceLost(line))

    def _kill_silent(self) -> None:
        """Kill ranks that are stopped or hang. While no batch runs, nothing else notices them."""
        checked = monotonic()
        while not (self._closing or self._ended.wait(BEAT)):
            # If this process or the machine was paused, that time is not counted as silence.
            passed = min(monotonic() - checked, 2 * BEAT)
            checked = monotonic()
            for rank in list(self._silence):
                self._silence[rank] += passed
                if self._silence[rank] > MAX_SILENCE:
                    self._processes[rank - 1].kill()

    def _end(self, cause: ConfigError | DeviceLost) -> None:
        with self._lock:
            if self._closing or self._cause is not None:
                return
            self._cause = cause
        if isinstance(cause, DeviceLost):
            self._lost(str(cause))
        self._ended.set()
        for loaded in self._loaded.values():
            loaded.set()
        self.abort()


def _environment(rank: int, device: str) -> dict[str, str]:
    """Return a rank's environment variables: it sees only its own GPU, and gets no API key."""
    variables = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    if device == "cuda":
        shown = os.environ.get(VISIBLE)
        variables[VISIBLE] = str(rank) if shown is None else shown.split(",")[rank].strip()
    return variables
