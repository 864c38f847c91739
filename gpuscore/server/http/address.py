"""The server's addresses, as listening sockets."""

import errno
import socket

from gpuscore.config import ServerConfig
from gpuscore.errors import ConfigError
from gpuscore.server.http.headers import LOOPBACK

BACKLOG = 2048  # connections that the kernel holds for one socket
ACCEPTS = 128  # connections that a round of the loop accepts: asyncio's own backlog


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket on the configured address; raise ConfigError if it cannot be bound."""
    flags = f"--host {config.host} --port {config.port}"
    return _bound(config.host, config.port, flags, "; name another by --port, with make by PORT=")


def metrics_address(wanted: str) -> tuple[str, int]:
    """Return the address that `--metrics-port` names; raise ConfigError if it names none."""
    host, _, port = wanted.rpartition(":")
    if not (port.isascii() and port.isdecimal()):
        raise ConfigError(f"--metrics-port {wanted}: must be PORT or ADDRESS:PORT")
    return host.strip("[]") or LOOPBACK, int(port)


def bind_metrics(wanted: str) -> socket.socket:
    """Return a socket on the address of the metrics; raise ConfigError if it cannot be bound."""
    return _bound(*metrics_address(wanted), f"--metrics-port {wanted}")


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


def address_of(sock: socket.socket) -> str:
    """Return the address of a socket as a URL has it."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
