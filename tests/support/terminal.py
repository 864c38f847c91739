"""A command of gpuscore on a terminal of its own."""

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.programs import Process, start


class Screen:
    """The text that a terminal has got, read in a thread."""

    def __init__(self, descriptor: int) -> None:
        self.text, self._descriptor = "", descriptor
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # the other side is closed
                return
            self.text += data.decode(errors="replace").replace("\r\n", "\n")

    def close(self) -> None:
        self._thread.join()
        os.close(self._descriptor)


@contextmanager
def on_terminal(*words: str, **environment: str) -> Iterator[tuple[Process, Screen]]:
    """Start the command with both outputs on a new terminal; kill it at the end."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    variables = os.environ | environment
    process = start("gpuscore", words, stdout=child, stderr=child, env=variables)
    os.close(child)
    screen = Screen(parent)
    try:
        yield process, screen
    finally:
        process.kill()
        process.wait()
        screen.close()
