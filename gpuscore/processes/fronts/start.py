"""The start of a server of several fronts, which its programs have in common."""

from collections.abc import Callable, Sequence
from functools import partial

from gpuscore.config import ServerConfig
from gpuscore.processes.fronts.board import Board
from gpuscore.processes.fronts.engines import SupervisedEngine, SupervisedReplicas
from gpuscore.processes.fronts.forker import Forker, FrontMain
from gpuscore.processes.fronts.front import FrontApp, run_front
from gpuscore.processes.fronts.parent import Fronts
from gpuscore.processes.worker.process import EngineListener
from gpuscore.server.http.address import bind_all
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.stopping import StopLines


class FrontSetup:
    """Memory and sockets that fronts and engines share; make it before their processes.

    Args:
        fronts: number of HTTP processes.
        engines: number of engines of each model.
    """

    def __init__(self, fronts: int, engines: Sequence[int]) -> None:
        self._board = Board(fronts, sum(engines), len(engines))
        self.listeners = [EngineListener() for _ in range(sum(engines))]

    def forker(self, prepare: Callable[[str], FrontApp]) -> Forker:
        """Start the process that forks fronts; call it in the main thread, before there are others.

        Args:
            prepare: makes the application, in that process, from the text that `Forker.prepare`
                gets.
        """
        return Forker(partial(self._main, prepare))

    def run(
        self,
        forker: Forker,
        config: ServerConfig,
        keys: ApiKeys,
        replicas: SupervisedReplicas,
        engines: Sequence[SupervisedEngine],
        announce: Callable[[str], None],
        say: Callable[[str], None] = lambda line: None,
    ) -> int:
        """Serve until a signal or a failure; return the exit code.

        Args:
            forker: prepared.
            config: of the server.
            keys: the API keys.
            replicas: of all models; planned.
            engines: of all models, started with `listeners`.
            announce: called with a front's lines once all fronts can score.
            say: prints a line for people without blocking.

        Raises:
            ConfigError: the address cannot be bound, or the model cannot be served.
            EngineFailed: the engines or the fronts were lost, at start or too often since.
        """
        sockets = bind_all(config, config.http_workers)
        lines = StopLines(say)
        board = self._board
        return Fronts(
            forker, board, config, keys, sockets, replicas, engines, announce, lines
        ).run()

    def _main(self, prepare: Callable[[str], FrontApp], text: str) -> FrontMain:
        addresses = [listener.address for listener in self.listeners]
        return partial(run_front, prepare(text), self._board, addresses)
