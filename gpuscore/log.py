"""The log: one JSON object per line on standard error, never a caller's text.

Standard output is left to the lines for people (loading, ready). A line per request is written by
`request_line`; whatever else is logged goes through `JsonFormatter`.
"""

import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType

import msgspec

MAX_MESSAGE = 2000  # characters of a message, and of a traceback
_PAUSE = 0.05  # seconds between writes, so that many lines go out at once
_CAPACITY = 10_000  # lines that may wait
_STANDARD_ERROR = 2


class JsonFormatter(logging.Formatter):
    """Log records as JSON lines.

    Of an exception only its type and where it was raised are shown: its message may quote what a
    caller sent.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": timestamp(),
            "level": record.levelname.lower(),
            "event": "log",
            "logger": record.name,
            "message": record.getMessage()[:MAX_MESSAGE],
        }
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = record.exc_info[0].__name__
            fields["traceback"] = "".join(traceback.format_tb(record.exc_info[2]))[-MAX_MESSAGE:]
        return msgspec.json.encode(fields).decode()


class LogWriter:
    """Writes lines from a thread of its own, so that a slow reader stops no request.

    Lines that find the queue full are dropped and counted.
    """

    def __init__(self, descriptor: int = _STANDARD_ERROR, capacity: int = _CAPACITY) -> None:
        self.dropped = 0
        self._descriptor, self._capacity = descriptor, capacity
        self._lines: deque[bytes] = deque()
        self._torn = False  # whether the last line that was written may lack its end
        self._wake, self._closing = threading.Event(), threading.Event()
        # A daemon that writes to the bare descriptor: one that is stuck there does not keep the
        # process from ending.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Take a line, with its end. From any thread; never waits."""
        if len(self._lines) >= self._capacity:
            self.dropped += 1
            return
        self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, seconds: float = 1.0) -> None:
        """Write what is there, for at most so long."""
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
        # A line that was cut off by a full disk ends before the next one begins.
        whole = b"\n" * (self._torn and bool(lines)) + b"".join(lines)
        rest = memoryview(whole)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody has made the descriptor non-blocking
                if self._closing.wait(_PAUSE):
                    return
            except OSError:  # nobody reads any more, or the disk is full
                self.dropped += bytes(rest).count(b"\n")
                self._torn |= len(rest) < len(whole)
                return
        self._torn = False


class _WriterHandler(logging.Handler):
    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.writer.write(self.format(record).encode() + b"\n")


@contextmanager
def json_logging(writer: LogWriter) -> Iterator[None]:
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
