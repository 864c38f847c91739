"""Sums and exchanges of tensors among the ranks, by gloo on CPUs and NCCL on GPUs.

The groups of torch.distributed are used without its global state. So a process may hold several
models, and a program that uses `Scorer` may have groups of its own.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from gpuscore.backends.base import DeviceLost
from gpuscore.backends.common.shards import Shard

# `engine_timeout` limits how long a rank waits for a batch; the group sets no limit.
FOREVER = timedelta(days=365)
CONNECT = timedelta(seconds=60)  # all ranks have loaded their weights by then
LOOPBACK = "127.0.0.1"
_DISTRIBUTED: Any = torch.distributed  # its type stubs lack what is used here


class PeerLost(DeviceLost):
    """Another rank is gone, or did not take part in a sum."""


class RankGroup:
    """This rank's end of the group.

    Args:
        shard: the rank's place.
        device: where its tensors are.
        path: a file that does not exist yet, through which the ranks find each other.
        meet: called before the group connects; returns when every rank is about to connect.
    """

    def __init__(
        self, shard: Shard, device: torch.device, path: Path, meet: Callable[[], None]
    ) -> None:
        self.shard = shard
        self._device = device
        self._path = path
        self._meet = meet
        self._joined: Any = None  # the group of torch.distributed

    def connect(self) -> None:
        """Join the other ranks, once all have loaded their weights.

        Raises:
            ConfigError: another rank refuses the model.
            DeviceLost: another rank is gone.
        """
        self._meet()
        store = _DISTRIBUTED.FileStore(str(self._path), self.shard.ranks)
        store.set_timeout(CONNECT)
        try:
            self._joined = self._join(store)
        except RuntimeError as error:
            raise PeerLost(f"the ranks cannot find each other: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        """Add up x of all ranks, in place; return it."""
        if x.numel():
            self._wait(lambda group: group.allreduce([x]))
        return x

    def of_first(self, x: Tensor) -> Tensor:
        """Return x of rank 0 on every rank; the other ranks' x is overwritten."""
        return self.sum(x if self.shard.rank == 0 else x.zero_())

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return x of all ranks, in their order; it has the same shape on each."""
        gathered = [torch.empty_like(x) for _ in range(self.shard.ranks)]
        if x.numel():
            self._wait(lambda group: group.allgather([gathered], [x]))
        return gathered

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return min(int(value) for value in self.gather(torch.tensor([number], device=self._device)))

    def abort(self) -> None:
        """End a wait for other ranks, which then raises an error; any thread may call this."""
        if self._joined is not None:
            self._joined.abort()

    def _join(self, store: Any) -> Any:
        place = store, self.shard.rank, self.shard.ranks
        if self._device.type == "cuda":
            nccl = _DISTRIBUTED.ProcessGroupNCCL  # which torch's CPU build does not have
            return nccl(*place, nccl.Options())
        gloo = _DISTRIBUTED.ProcessGroupGloo
        options = gloo._Options()
        # All ranks are on this machine: nothing listens on its other addresses.
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = FOREVER
        return gloo(*place, options)

    def _wait(self, start: Callable[[Any], Any]) -> None:
        assert self._joined is not None, "the ranks are not connected yet"  # noqa: S101
        try:
            start(self._joined).wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.shard.rank} lost another rank: {error}") from error
