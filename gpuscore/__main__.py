"""The process of the `gpuscore` command: what has to hold before anything else is imported.

Descriptors 0 to 2 are open, a signal during the imports ends the process without a traceback, and
output that nobody takes is no traceback either. The commands themselves are in `cli`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

TYPE_CHECKING = False  # of typing, whose import takes longer than all the others here
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import TextIO

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = 0, 1, 2
EXIT_FAILED = 1
EXIT_SIGNAL = 128  # and the signal's number
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """The console script's entry; returns the exit code."""
    _open_standard_streams()
    _end_at_signals()
    from gpuscore.cli import main as run  # whose imports take a tenth of a second

    try:
        return _written(_code(run))
    except OSError as error:
        if error.errno not in UNWRITABLE or (error.errno == errno.EPIPE and not _reader_left()):
            raise
        return _unwritten(error)


def _code(run: Callable[[], int]) -> int:
    """What a command returns, or what argparse exits with after it has printed help."""
    try:
        return run()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            return ended.code
        raise


def _open_standard_streams() -> None:
    """Open what the caller has closed, or the next socket would be standard error."""
    for descriptor in (STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)
    sys.stdout = sys.stdout or _stream(STANDARD_OUTPUT)
    sys.stderr = sys.stderr or _stream(STANDARD_ERROR)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115


def _open_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    os.set_inheritable(descriptor, True)  # or a child would have the gap


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _end_at_signals() -> None:
    """Until the server has handlers of its own. What is ignored, as by nohup, stays ignored."""
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_SIGNAL + number)  # no exception, which an import would show as a traceback


def _written(code: int) -> int:
    """The exit code once all output is out."""
    error = _refusal(sys.stdout)
    _drop_unwritable(sys.stderr, STANDARD_ERROR)
    return code if error is None else _unwritten(error, code)


def _refusal(stream: TextIO) -> OSError | None:
    """Why a stream does not take what was written to it."""
    try:
        stream.flush()
    except OSError as error:
        return error
    return None


def _unwritten(error: OSError, code: int = 0) -> int:
    """The exit code of a command whose output was not taken; says so, but not of a pipe whose
    reader has seen enough."""
    _drop_unwritable(sys.stdout, STANDARD_OUTPUT)
    if isinstance(error, BrokenPipeError):
        return code or EXIT_SIGNAL + signal.SIGPIPE
    print(f"gpuscore: the output cannot be written: {error.strerror}", file=sys.stderr)
    _drop_unwritable(sys.stderr, STANDARD_ERROR)
    return code or EXIT_FAILED


def _reader_left() -> bool:
    """Whether standard output is a pipe that nobody can read any more."""
    poll = select.poll()
    poll.register(STANDARD_OUTPUT, 0)
    return bool(poll.poll(0))


def _drop_unwritable(stream: TextIO, descriptor: int) -> None:
    """Let the interpreter's own last flush succeed, which would change the exit code to 120."""
    if _refusal(stream) is not None:
        _open_null(descriptor)


if __name__ == "__main__":
    sys.exit(main())
