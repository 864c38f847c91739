"""The loading of a server's models, each in a thread that then waits for the engine's end."""

import gc
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gpuscore.dialects.served import LoadedModel, ServedModel

ModelLoad: TypeAlias = tuple[ServedModel, Callable[[], LoadedModel]]


class ModelLoads:
    """Loads all models; ends the server if one cannot be loaded, or its engine fails for good.

    Args:
        models: each one with a function that loads and warms it.
        announce: called once all models are loaded.
        failed: called after the first error, which `error` then holds.
    """

    def __init__(
        self,
        models: Sequence[ModelLoad],
        announce: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.error: BaseException | None = None
        self._models, self._announce, self._failed = models, announce, failed
        self._left = len(models)  # models that are not loaded
        self._lock = threading.Lock()
        self._loaded = threading.Event()

    def start(self, patience: float) -> None:
        """Start all threads; wait for them, but at most this many seconds."""
        for served, load in self._models:
            threading.Thread(target=self._run, args=(served, load), daemon=True).start()
        self._loaded.wait(patience)

    def _run(self, served: ServedModel, load: Callable[[], LoadedModel]) -> None:
        try:
            model = load()
            gc.collect()
            gc.freeze()  # all objects made so far stay, so garbage collection need not visit them
            served.loaded = model
            self._count()
            model.wait_ended()
        except BaseException as error:  # noqa: BLE001  (raised again by `serve`, in the main thread)
            with self._lock:
                self.error = self.error or error
            self._failed()

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._loaded.set()
            self._announce()
