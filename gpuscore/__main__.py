"""The process of the `gpuscore` command: its set-up before, and its exit after, `cli` runs.

Before anything else is imported, descriptors 0 to 2 are opened and signals are set to end the
process without a traceback. Output that cannot be written causes no traceback either. The commands
themselves are in `cli`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys

TYPE_CHECKING = False  # not from typing, whose import takes longer than all the others here
if TYPE_CHECKING:
    from types import FrameType
    from typing import TextIO

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
EXIT_FAILED = 1
EXIT_SIGNAL = 128  # plus the signal's number
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the console script and return the exit code."""
    _open_standard_streams()
    _end_at_signals()
    from gpuscore.commands.cli import (
        main as run,  # after the signals, as this takes a tenth of a second
    )

    try:
        code = run()
    except SystemExit as ended:  # argparse has printed help or an error
        if not isinstance(ended.code, int):
            raise
        code = ended.code
    except OSError as error:
        if error.errno not in UNWRITABLE or (error.errno == errno.EPIPE and not _reader_left()):
            raise
        return _unwritten(error)
    refused = _refusal(sys.stdout)
    _drop_unwritable(sys.stderr, STANDARD_ERROR)
    return code if refused is None else _unwritten(refused, code)


def _open_standard_streams() -> None:
    """Open closed standard descriptors; otherwise the next socket could become standard error."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:  # the lowest that is free
        os.set_inheritable(null, True)  # otherwise it would be closed in a child
    os.close(null)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115


def _end_at_signals() -> None:
    """End the process at signals until the server sets its own handlers.

    A signal that is ignored, as by nohup, stays ignored.
    """
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_SIGNAL + number)  # an exception during an import would print a traceback


def _refusal(stream: TextIO) -> OSError | None:
    """Flush a stream; return the error if its output cannot be written."""
    try:
        stream.flush()
    except OSError as error:
        return error
    return None


def _unwritten(error: OSError, code: int = 0) -> int:
    """Return the exit code of a command whose output could not be written, and report the error.

    A pipe whose reader has closed it is not reported.
    """
    _drop_unwritable(sys.stdout, STANDARD_OUTPUT)
    if isinstance(error, BrokenPipeError):
        return code or EXIT_SIGNAL + signal.SIGPIPE
    print(f"gpuscore: the output cannot be written: {error.strerror}", file=sys.stderr)
    _drop_unwritable(sys.stderr, STANDARD_ERROR)
    return code or EXIT_FAILED


def _reader_left() -> bool:
    """Return True if standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(STANDARD_OUTPUT, 0)
    return bool(poll.poll(0))


def _drop_unwritable(stream: TextIO, descriptor: int) -> None:
    """Redirect an unwritable stream to null, because a failed flush at exit sets exit code 120."""
    if _refusal(stream) is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())
