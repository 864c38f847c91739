"""The server's address: listening sockets of one process, or of several that share a port."""

import errno
import socket

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.server.http.timing import Listener

BACKLOG = 2048  # connections that the kernel holds for one socket


def bind(config: ServerConfig) -> Listener:
    """Return a listener on the configured address; raise ConfigError if it cannot be bound."""
    (sock,) = bind_all(config, 1)
    return Listener(fileno=sock.detach())


def bind_metrics(host: str, port: int) -> Listener:
    """Return a listener on the address of the metrics; raise ConfigError if it cannot be bound."""
    sock = _bound(host, port, f"--metrics-host {host} --metrics-port {port}")
    return Listener(fileno=sock.detach())


def bind_all(config: ServerConfig, count: int) -> list[socket.socket]:
    """Return sockets that listen on the configured address; the kernel shares out connections.

    Raises:
        ConfigError: the address cannot be bound. No other process can listen on it later either.
    """
    flags = f"--host {config.host} --port {config.port}"
    first = _bound(config.host, config.port, flags, "; name another by --port, with make by PORT=")
    return [first, *(_another(first) for _ in range(count - 1))]


def _bound(host: str, port: int, flags: str, if_in_use: str = "") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:  # OverflowError: a port over 65535
        reason = getattr(error, "strerror", None) or "no such port"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason += if_in_use
        raise ConfigError(f"cannot bind {flags}: {reason}") from error
    # Connections inherit this option. asyncio sets it only on sockets made with an explicit
    # protocol. Without it, an answer of more than one packet may wait 40 ms for an ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _another(first: socket.socket) -> socket.socket:
    """Return a further socket on the address of the first.

    The first one gets SO_REUSEPORT after it was bound: before, two servers could bind one port.
    """
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock = socket.socket(first.family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if sock.family == socket.AF_INET6:
        only = first.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind(first.getsockname())
    sock.listen(BACKLOG)
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the address of a socket as a URL has it."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
