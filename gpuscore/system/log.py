"""The log on standard error: lines of JSON, or of text for a terminal; never with a caller's text.

Standard output is for people (loading, ready, stopping). `server.observe.operations` makes the line
of each request, `log_line` all other lines.
"""

import logging
import os
import select
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TypeAlias

import msgspec

LogFormat: TypeAlias = Literal["json", "text"]

MAX_MESSAGE = 2000  # most characters of a message, and of a traceback
_PAUSE = 0.05  # seconds between writes, so that many lines go out at once
_CAPACITY = 10_000  # most lines that may wait
_STANDARD_ERROR = 2


def log_line(record: logging.LogRecord, style: LogFormat = "json") -> bytes:
    """Return a log record as a line of JSON, or of text for people.

    An exception appears with its type and traceback only: its message may quote a caller's text.
    """
    level = record.levelname.lower()
    message = record.getMessage()[:MAX_MESSAGE]
    raised: dict[str, str] = {}
    if record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_tb(record.exc_info[2]))[-MAX_MESSAGE:]
        raised = {"exception": record.exc_info[0].__name__, "traceback": trace}
    if style == "text":
        error = f" ({raised['exception']})\n{raised['traceback'].rstrip()}" if raised else ""
        return f"{clock_time()} {level}: {message}{error}\n".encode()
    fields = {"time": timestamp(), "level": level, "event": "log", "logger": record.name}
    return msgspec.json.encode({**fields, "message": message, **raised}) + b"\n"


class LogWriter:
    """Writes log lines in its own thread, so that a slow reader does not delay requests.

    If the queue is full, lines are dropped and counted.

    Attributes:
        style: "text" on a terminal, "json" elsewhere.
    """

    def __init__(self, descriptor: int = _STANDARD_ERROR, capacity: int = _CAPACITY) -> None:
        self.dropped = 0
        self.style: LogFormat = "text" if os.isatty(descriptor) else "json"
        self._descriptor = descriptor
        self._capacity = capacity
        self._lines: deque[bytes] = deque()
        self._torn = False  # the end of the last line may be missing
        self._wake = threading.Event()
        self._closing = threading.Event()
        # A daemon thread that writes to the bare descriptor: if it is stuck in a write, the process
        # can still end.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line, which must end with a line end. Thread-safe; never waits."""
        if len(self._lines) >= self._capacity:
            self.dropped += 1
            return
        self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, seconds: float = 1.0) -> None:
        """Write the queued lines, for at most `seconds`, and end the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)

    def __enter__(self) -> "LogWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            self._write_all()
            self._closing.wait(_PAUSE)
        self._write_all()

    def _write_all(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        for piece in _pieces(lines):
            self._write_piece(piece)

    def _write_piece(self, piece: bytes) -> None:
        # If a full disk has cut a line off, end that line before the next one.
        whole = b"\n" * self._torn + piece
        rest = memoryview(whole)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                if self._closing.wait(_PAUSE):
                    return
            except OSError:  # the reader has left, or the disk is full
                self.dropped += bytes(rest).count(b"\n")
                self._torn |= len(rest) < len(whole)
                return
        self._torn = False


def _pieces(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines to pieces that a pipe takes whole: lines of several processes must not mix."""
    piece = bytearray()
    for line in lines:
        if piece and len(piece) + len(line) > select.PIPE_BUF:
            yield bytes(piece)
            piece.clear()
        piece += line
    if piece:
        yield bytes(piece)


class _WriterHandler(logging.Handler):
    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer

    def close(self) -> None:
        """Write what is queued; `logging.shutdown` calls this before a process ends."""
        self.writer.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.write(log_line(record, self.writer.style))


@contextmanager
def logging_to(writer: LogWriter) -> Iterator[None]:
    """Send all log records of the process through the writer."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [_WriterHandler(writer)]
    logging.captureWarnings(True)
    sys.stderr.flush()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock_time() -> str:
    """Return the local time of day, for people."""
    return datetime.now().strftime("%H:%M:%S")
