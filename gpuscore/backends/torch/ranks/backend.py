"""`ParallelBackend`: tensor parallelism, shown to the engine as one backend."""

from collections.abc import Callable
from typing import TypeVar

from gpuscore.backends.base import DeviceLost
from gpuscore.backends.torch.backend import Launched, TorchBackend
from gpuscore.backends.torch.group import PeerLost, RankGroup
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.backends.torch.ranks.messages import Kind, words_of
from gpuscore.backends.torch.ranks.peers import Peers
from gpuscore.types.batch import BackendLimits, PackedBatch, RowScores

ResultT = TypeVar("ResultT")


class ParallelBackend:
    """Implements `Backend` with ranks that share a model and compute every batch together.

    After an error in the middle of a batch the ranks are out of step. So every error ends the
    backend with `DeviceLost`.

    Args:
        plan: what rank 0 loads.
        lost: called with a one-line message when a rank has ended.

    Attributes:
        rank0: the backend of this process.

    Raises:
        ConfigError: any rank's `TorchBackend` has raised it.
        DeviceLost: a rank has ended.
    """

    def __init__(self, plan: TorchPlan, lost: Callable[[str], None] = lambda line: None) -> None:
        self._peers = Peers(plan, lost)
        group = RankGroup(plan.shard, plan.device, self._peers.rendezvous, self._peers.wait_loaded)
        self._peers.abort = group.abort
        try:
            self.rank0 = TorchBackend(plan, group=group)
            self._peers.delete_rendezvous()
        except PeerLost:
            cause = self._peers.cause()
            self._peers.close()
            raise cause from None
        except BaseException:
            self._peers.close()
            raise

    @property
    def limits(self) -> BackendLimits:
        return self.rank0.limits

    @property
    def layers_done(self) -> int:
        return self.rank0.layers_done

    def warmup(self) -> None:
        self._peers.send(Kind.WARMUP)
        self._run(self.rank0.warmup)

    def extend(self, batch: PackedBatch) -> Launched:
        self._peers.send(Kind.BATCH, words_of(batch))
        return self.rank0.extend(batch)

    def collect(self, pending: Launched) -> RowScores:
        return self._run(lambda: self.rank0.collect(pending))

    def close(self) -> None:
        self.rank0.close()  # before the peers: a running batch needs them
        self._peers.close()

    def _run(self, run: Callable[[], ResultT]) -> ResultT:
        try:
            return run()
        except PeerLost:
            raise self._peers.cause() from None
        except Exception as error:
            raise DeviceLost(f"rank 0 failed in the middle of a batch: {error}") from error
