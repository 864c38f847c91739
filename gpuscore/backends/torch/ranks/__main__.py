"""The program of a rank other than rank 0, which starts it.

    python -P -m gpuscore.backends.torch.ranks SOCKET

SOCKET is the file descriptor of a socket to rank 0. The program does what rank 0 does: it loads its
shard, measures the same batches, then computes every batch that rank 0 sends. It ends when the
socket is closed. It inherits the environment of rank 0, which holds the settings of torch's
allocator.
"""

import signal

from gpuscore.exits import STOPS

# A terminal sends its signals to all processes, but only rank 0 may act on them. This comes before
# the imports, because those take seconds.
if __name__ == "__main__":
    for _number in STOPS:
        signal.signal(_number, signal.SIG_IGN)

import json
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import sleep

from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.group import PeerLost, RankGroup
from gpuscore.backends.torch.plan import plan_backend
from gpuscore.backends.torch.ranks.messages import BEAT, Kind, batch_of, frames, send
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.system.heap import use_one_arena

MAX_TEXT = 2000  # most characters of an error that are sent
LOST_SECONDS = 20.0  # after another rank is lost, how long to wait until rank 0 ends


def main(descriptor: str) -> None:
    use_one_arena()
    sock = socket.socket(fileno=int(descriptor))
    inbox: SimpleQueue[tuple[Kind, bytes]] = SimpleQueue()
    Thread(target=_receive, args=(sock, inbox), name="inbox", daemon=True).start()
    _, start = inbox.get()
    try:
        _serve(sock, inbox, **json.loads(start))
    except ConfigError as error:
        with suppress(OSError):  # rank 0 may be gone
            send(sock, Kind.REFUSED, str(error).encode())


def _receive(sock: socket.socket, inbox: "SimpleQueue[tuple[Kind, bytes]]") -> None:
    with suppress(OSError):  # rank 0 was killed before it read all heartbeats
        for frame in frames(sock):
            inbox.put(frame)
    os._exit(0)  # rank 0 is gone, and the main thread might wait for it forever


def _send_heartbeats(sock: socket.socket, send_lock: Lock) -> None:
    with suppress(OSError):  # rank 0 may be gone
        while True:
            with send_lock:
                send(sock, Kind.ALIVE)
            sleep(BEAT)


def _serve(
    sock: socket.socket,
    inbox: "SimpleQueue[tuple[Kind, bytes]]",
    directory: str,
    config: dict[str, object],
    path: str,
    rank: int,
) -> None:
    plan = plan_backend(Path(directory), ModelConfig(**config), rank)  # type: ignore[arg-type]
    report_loaded = partial(send, sock, Kind.LOADED)
    send_lock = Lock()
    try:
        group = RankGroup(plan.shard, plan.device, Path(path), report_loaded)
        backend = TorchBackend(plan, group=group)
        while True:
            kind, body = inbox.get()
            if kind is Kind.WARMUP:
                backend.warmup()
                # Not before: compiling kernels can block all Python threads for seconds.
                beat = Thread(target=_send_heartbeats, args=(sock, send_lock), name="heartbeat")
                beat.daemon = True
                beat.start()
            else:
                backend.collect(backend.extend(batch_of(body)))
    except PeerLost:
        Event().wait(LOST_SECONDS)  # rank 0 reports which rank was lost first
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (rank 0 logs it and ends all ranks)
        with suppress(OSError), send_lock:
            send(sock, Kind.FAILED, f"{type(error).__name__}: {error}"[:MAX_TEXT].encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(1)  # at once: torch's shutdown can take seconds, and there is nothing to save
