"""Descriptors of files and sockets: a process has a limit, and each connection takes one."""

import asyncio
import errno
import logging
import resource
from typing import Any

logger = logging.getLogger(__name__)

RESERVE = 128  # for all but connections: listeners, engines, files
# The errors of `accept` after which asyncio accepts nothing for a second.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit(connections: int) -> None:
    """Raise the limit of this process and its children as far as they may need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVE
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def warn_of_limit(connections: int) -> None:
    """Log a warning if connections could take all descriptors."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < connections + RESERVE:
        logger.warning(
            "%d connections need %d descriptors, and this process may have %d: raise its limit "
            "(ulimit -n, LimitNOFILE=)",
            connections,
            connections + RESERVE,
            soft,
        )


_logged = 0.0  # when an error of `accept` was logged


def log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop; errors of `accept`, which may be many, at most one a second.

    asyncio accepts nothing for a second after such an error.
    """
    global _logged
    error = context.get("exception")
    if not isinstance(error, OSError) or error.errno not in EXHAUSTED or "socket" not in context:
        loop.default_exception_handler(context)
    elif loop.time() - _logged > 0.5:
        _logged = loop.time()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        logger.error(
            "no connection can be accepted for a second: %s; this process may have %d descriptors",
            error.strerror,
            soft,
        )
