"""The signals that the parent of the fronts handles."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gpuscore.config import ServerConfig
from gpuscore.server.stopping import stop_signals


@contextmanager
def handled_signals(
    config: ServerConfig, note: Callable[[int, FrameType | None], None], wake: socket.socket
) -> Iterator[None]:
    """Call `note` at signals that stop the server or make it read its keys again.

    Args:
        config: with a key file, SIGHUP is among the signals.
        note: the handler.
        wake: gets a byte at every signal, to end a wait.
    """
    numbers = stop_signals(config)
    if config.api_key_file is not None:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    waker = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            signal.signal(number, handler)
