"""The actor that hosts an engine on a node.

Ray gets this module by value, so it must not import gpuscore while it is read: a node without
gpuscore, or with another version, then says so itself.
"""

from typing import Any


class EngineActor:
    """An engine's process on the node that Ray has chosen, and answers to questions about the node.

    Nothing but plain Python values and encoded messages crosses to the driver.
    """

    def __init__(self) -> None:
        self._hosted: Any = None

    def describe(self) -> dict[str, Any]:
        """Return the fields of `gpuscore.ray.bulk.node.NodeFacts`."""
        import os
        import platform

        import ray

        try:
            from gpuscore import __version__ as version
        except ImportError as error:
            version = f"none ({error})"
        return {
            "id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "python": platform.python_version(),
            "gpuscore": version,
            "cores": os.cpu_count() or 1,
        }

    def files(self, model: str, revision: str | None) -> dict[str, tuple[int, str]] | str:
        """Return the sizes and digests of the model's files here, or why there are none."""
        from gpuscore.ray.bulk.node import find_files

        return find_files(model, revision)

    def start(self, model: str, revision: str | None, start: bytes) -> None:
        """Start the engine's process with an encoded `Start`, whose directory is set here."""
        from gpuscore.ray.bulk.hosted import HostedEngine

        self._hosted = HostedEngine(model, revision, start)

    def send(self, frames: list[bytes]) -> None:
        """Send messages to the engine's process, in order."""
        self._hosted.send(frames)

    def receive(self, seconds: float) -> tuple[bytes, list[bytes]]:
        """Wait for messages; return the engine's encoded state and the new messages."""
        found: tuple[bytes, list[bytes]] = self._hosted.receive(seconds)
        return found
