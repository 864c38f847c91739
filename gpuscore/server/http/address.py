"""The server's addresses, as listening sockets."""

import errno
import resource
import socket

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError

BACKLOG = 2048  # connections that the kernel holds for one socket
ACCEPTS = 128  # connections that a round of the loop accepts: asyncio's own backlog
# File descriptors for everything else, and for connections over the limit: asyncio accepts them and
# closes them some rounds later.
RESERVE = 4 * ACCEPTS


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket on the configured address; raise ConfigError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        sock = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            reason += "; choose another with --port, or PORT= with make"
        raise ConfigError(
            f"cannot bind --host {config.host} --port {config.port}: {reason}"
        ) from error
    # Connections inherit this option. asyncio sets it only on sockets made with an explicit
    # protocol. Without it, an answer of more than one packet may wait 40 ms for an ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the address of a socket as a URL has it."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connections_here(limit: int) -> int:
    """Return how many connections this process may have, at most `limit`.

    Each takes a descriptor. The limit on descriptors is raised as far as needed and allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limit + RESERVE
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return min(limit, max(soft - RESERVE, soft // 2))
    return limit
