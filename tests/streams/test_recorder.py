"""Promise: the recorder sees every write, to pinned and to device memory, and CPU tensors behave as
a device's would."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.batches import in_one_batch
from support.streams.host_arrays import HostArray, byte_range
from support.streams.recorder import DEFAULT, Recorder
from support.streams.runner import SETUPS, device_of, make_backend
from support.streams.tensors import DEVICE, Card, Pinned
from support.streams.turns import Turns


class Witness(Recorder):
    """A recorder that compares all memory before and after every operation."""

    def __init__(self):
        super().__init__(Turns(0))
        self.memory, self.before = {}, {}
        self.declared, self.last = [], "nothing"  # writes of the operation before
        self.changed, self.undeclared = 0, []
        self.watching = False

    def allocate(self, memory):
        block = super().allocate(memory)
        if self.thread not in self.captures:  # what only graphs use is their pool's
            self.watch(block.number, memory)
        return block

    def free(self, block):
        super().free(block)
        self.memory.pop(block.number, None)

    def pin(self, memory):
        super().pin(memory)
        self.watch(self._pinned[-1][2], memory)

    def start(self):
        self.before = {number: now.copy() for number, now in self.memory.items()}
        self.declared, self.watching = [], True

    def watch(self, number, memory):
        if memory.untyped_storage().nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()).numpy()
            self.memory[number], self.before[number] = whole, whole.copy()

    def run(self, name, where, reads, writes):
        super().run(name, where, reads, writes)
        self.compare(name, writes)

    def host(self, name, reads, writes):
        super().host(name, reads, writes)
        self.compare(name, writes)

    def compare(self, name, writes):
        """Compare all memory with that before the last operation, which has ended by now."""
        for number, now in list(self.memory.items()) if self.watching else ():
            changed = np.flatnonzero(now != self.before[number])
            if len(changed) == 0:
                continue
            self.changed += len(changed)
            for span in self.declared:
                if span.block == number:
                    changed = changed[(changed < span.start) | (changed >= span.end)]
            if len(changed):
                self.undeclared.append(f"{self.last} in block {number}, byte {changed[0]}")
            self.before[number] = now.copy()
        self.declared, self.last = writes, name


def some_batches():
    rng = np.random.default_rng(0)
    for query, items in ((20, (3, 5)), (40, (9, 30)), (1, (1,))):
        ids = [rng.integers(0, 1000, n).tolist() for n in items]
        batch = in_one_batch(rng.integers(0, 1000, query).tolist(), ids, [3, 17])
        yield replace(batch, num_top=20 * (query == 40))


def witnessed(model):
    """Return what a witness saw of batches with graphs and without."""
    witness = Witness()
    with device_of(witness):
        backend = make_backend(model, SETUPS[0])
        ran = backend.launcher.replayed, backend.launcher.launched
        witness.start()
        pending = [backend.extend(batch) for batch in some_batches()]
        for launched in pending:
            backend.collect(launched)
        backend.close()
    launcher = backend.launcher
    assert (launcher.replayed - ran[0], launcher.launched - ran[1]) == (2, 1)
    return witness


@pytest.mark.slow
def test_every_write_is_declared(model):
    witness = witnessed(model)
    assert not witness.undeclared
    assert witness.changed > 10**4
    assert not witness.checker.findings


@pytest.mark.slow
def test_a_host_write_that_is_not_recorded_is_seen(model, monkeypatch):
    def silently(self, key, value):
        self.plain()[key] = value.plain() if isinstance(value, HostArray) else value

    monkeypatch.setattr(HostArray, "__setitem__", silently)
    assert witnessed(model).undeclared


@contextmanager
def device():
    recorder = Recorder(Turns(0))
    with device_of(recorder), torch.inference_mode():
        yield recorder


def findings(recorder):
    return [finding.kind for finding in recorder.checker.findings.values()]


def test_memory_of_host_and_device_is_kept_apart():
    with device():
        card = torch.zeros(4, device=DEVICE)
        assert isinstance(card, Card)
        assert card.device == DEVICE
        assert type(card.cpu()) is torch.Tensor
        with pytest.raises(RuntimeError, match="expected all tensors to be on cuda:0"):
            card + torch.ones(4)
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            card.numpy()


def test_a_view_shares_its_memory_and_a_result_does_not():
    with device():
        card = torch.arange(8, device=DEVICE)
        view, result = card[2:4], card + 1
        assert view.block is card.block
        assert result.block is not card.block
        assert (view.span.start, view.span.end) == (16, 32)
        assert card.view(2, 4).transpose(0, 1).span == card.span
        view.fill_(7)
        assert card.tolist() == [0, 1, 7, 7, 4, 5, 6, 7]


def test_an_asynchronous_copy_is_not_done_when_it_returns():
    with device() as recorder:
        host, card = torch.zeros(4, pin_memory=True), torch.ones(4, device=DEVICE)
        assert isinstance(host, Pinned)
        host.copy_(card, non_blocking=True)
        host.numpy().sum()
        assert findings(recorder) == ["read before the copy to it has ended"]


def test_a_blocking_copy_is_done_when_it_returns():
    with device() as recorder:
        host, card = torch.zeros(4, pin_memory=True), torch.ones(4, device=DEVICE)
        host.copy_(card)
        assert host.numpy().sum() == 4
        assert card.sum().item() == 4
        host.numpy()[1:] = 5
        assert findings(recorder) == []


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"),
    [(False, False, True), (False, True, False), (True, False, True), (True, True, False)],
)
def test_copies_to_the_device_wait_as_torch_does(pinned, non_blocking, waits):
    with device() as recorder:
        torch.zeros(4, pin_memory=pinned).to(DEVICE, non_blocking=non_blocking)
        assert (recorder.checker.counts.waits["threads that waited for a stream"] == 1) is waits


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_copies_to_the_host_wait_as_torch_does(pinned, non_blocking, waits):
    with device() as recorder:
        card = torch.zeros(4, device=DEVICE)
        torch.zeros(4, pin_memory=pinned).copy_(card, non_blocking=non_blocking)
        assert (recorder.checker.counts.waits["threads that waited for a stream"] == 1) is waits


def test_arrays_record_what_they_touch():
    with device() as recorder:
        host, card = torch.zeros(8, pin_memory=True), torch.zeros(8, device=DEVICE)
        array = host.numpy()
        card[:4].copy_(host[:4], non_blocking=True)
        array[4:] = 1
        array[4:].reshape(2, 2)[0] += 2
        assert findings(recorder) == []
        array[3:5] = 1
        assert findings(recorder) == ["written while a copy from it is in flight"]
        assert host.tolist() == [0, 0, 0, 1, 1, 3, 1, 1]


def test_the_bytes_of_an_array():
    whole = np.zeros((4, 6), np.int32)
    start = whole.__array_interface__["data"][0]
    for view in (whole, whole[::-1], whole.T, whole[1:3, ::2], whole[3:0:-2, 5]):
        places = [start + int(offset) for offset in np.flatnonzero(marked(view, whole))]
        assert byte_range(view) == (places[0], places[-1] + 1)


def marked(view, whole):
    """Return which bytes of `whole` belong to `view`."""
    whole[...] = 0
    view[...] = -1
    return whole.view(np.uint8).ravel()


def test_a_graph_runs_on_the_memory_of_its_capture():
    with device() as recorder:
        source, got = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            got.copy_(source * 2 + 1)
        assert got.tolist() == [0, 0, 0], "a capture runs nothing"
        source.fill_(5)
        graph.replay()
        assert got.tolist() == [11, 11, 11]
        assert findings(recorder) == []


def test_a_thread_cannot_wait_during_a_capture():
    with device():
        card = torch.ones(3, device=DEVICE)
        with (
            pytest.raises(RuntimeError, match="captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            card.sum().item()


def test_the_current_stream_is_the_threads_own():
    with device() as recorder:
        other = torch.cuda.Stream(DEVICE)
        with torch.cuda.stream(other):
            assert torch.cuda.current_stream().name == other.name
        assert torch.cuda.current_stream().name == recorder.stream == DEFAULT
