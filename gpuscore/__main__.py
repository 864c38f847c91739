"""The process of the `gpuscore` command: its set-up before, and its exit after, `cli` runs.

Before anything else is imported, descriptors 0 to 2 are opened and signals are set to end the
process without a traceback. Output that cannot be written causes no traceback either. The commands
themselves are in `cli`.
"""

import errno
import os
import select
import signal
import sys

from gpuscore.exits import EXIT_FAILED, EXIT_SIGNAL, STOPS

STANDARD_OUTPUT = 1
STANDARD_ERROR = 2
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> int:
    """Run the console script and return the exit code."""
    _open_standard_streams()
    _end_at_signals()
    # After the signals, as this takes a tenth of a second.
    from gpuscore.commands.cli import main as run

    code = 0
    refused = None
    try:
        code = run()
    except SystemExit as ended:  # argparse has printed help or an error
        if not isinstance(ended.code, int):
            raise
        code = ended.code
    except OSError as error:
        if error.errno not in UNWRITABLE or (error.errno == errno.EPIPE and not _reader_left()):
            raise
        refused = error
    unflushed = _flush("stdout", STANDARD_OUTPUT)
    refused = refused or unflushed
    if isinstance(refused, BrokenPipeError):  # its reader has closed it, which is not reported
        code = code or EXIT_SIGNAL + signal.SIGPIPE
    elif refused is not None:
        print(f"gpuscore: the output cannot be written: {refused.strerror}", file=sys.stderr)
        code = code or EXIT_FAILED
    _flush("stderr", STANDARD_ERROR)
    return code


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
            # An exception during an import would print a traceback.
            signal.signal(number, lambda number, _: os._exit(EXIT_SIGNAL + number))


def _reader_left() -> bool:
    """Return True if standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(STANDARD_OUTPUT, 0)
    return bool(poll.poll(0))


def _flush(name: str, descriptor: int) -> OSError | None:
    """Flush a standard stream; return the error if its output cannot be written, and redirect it to
    null, because a failed flush at exit sets exit code 120."""
    try:
        getattr(sys, name).flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
