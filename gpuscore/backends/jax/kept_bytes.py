"""Remembers beside compiled programs how much memory they take, so that a start knows it before."""

import hashlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class KeptBytes:
    """The memory of one program, in a file of its own.

    Args:
        directory: of `--compile-cache`; None = nothing is kept.
        identity: everything that the figure depends on.
    """

    def __init__(self, directory: str | None, identity: str) -> None:
        name = f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}-bytes"
        self._path = None if directory is None else Path(directory) / name

    def read(self) -> int | None:
        """Return the bytes; None if none are kept."""
        if self._path is None or not self._path.exists():
            return None
        text = self._path.read_text(encoding="ascii", errors="replace")
        return int(text) if text.isdecimal() else None

    def write(self, count: int) -> None:
        """Keep the bytes; a directory that cannot be written gives a warning."""
        if self._path is None:
            return
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(str(count), encoding="ascii")
            part.replace(self._path)
        except OSError as error:
            logger.warning("--compile-cache: the size of a program is not kept: %s", error)
