"""Promise: the runner of our own kernels scores as torch does, with one copy in, one copy out, and
batches padded to fixed sizes.

In the interpreter a "graph" is the call that a CUDA device would have captured, on the same memory.
"""

import weakref
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.torch import backend as backend_module
from gpuscore.backends.torch import graph_launcher, mixture
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.backends.torch.queues import queue_of
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from gpuscore.types.batch import Prefix, Segment, pack, page_slots
from support.batches import Pages, int32, item_segments
from support.kernels import DEVICE, INTERPRETED
from support.slow import slow
from support.token_ids import random_ids

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1}
LABELS = [3, 17, 29]
GRAPH_TOKENS = 10


class NotingQueue:
    """A device's queue that counts what is pinned, and knows which captures still exist."""

    made = []

    def __init__(self, device):
        self.real, self.device = queue_of(device), device
        self.allocated, self.captures = 0, []
        # How many captures of earlier queues exist when this one captures for the first time.
        self.beside = None
        self.made.append(self)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def host(self, count, dtype):
        self.allocated += 1
        return self.real.host(count, dtype)

    def capture(self, run):
        if self.beside is None:
            self.beside = sum(queue.alive for queue in self.made[: self.made.index(self)])
        replay = self.real.capture(run)

        def replayed():
            replay()

        self.captures.append(weakref.ref(replayed))
        return replayed

    @property
    def alive(self):
        return sum(capture() is not None for capture in self.captures)


class LateQueue(NotingQueue):
    """A CPU's queue that copies as late as a device may: what is uploaded must not change, and what
    is downloaded is not there, before it is waited for.

    Attributes:
        during: called within a wait, when another thread may go on.
        wrong: what was changed too early.
    """

    def __init__(self, device):
        super().__init__(device)
        self.during, self.wrong, self.uploads = lambda: None, [], []

    def upload(self, host, device):
        self.real.upload(host, device)
        self.uploads.append((host, host.clone()))

    def download(self, device, host):
        arrives, uploads = device.clone(), self.uploads.copy()
        host.fill_(torch.nan)

        def wait():
            self.during()
            if not host.isnan().all():
                self.wrong.append("an answer that has not arrived was written to")
            self.settle(uploads)
            with torch.inference_mode():
                host.copy_(arrives)

        return wait

    def wait(self):
        self.settle(self.uploads.copy())

    def settle(self, uploads):
        for upload in [one for one in self.uploads if any(one is other for other in uploads)]:
            self.uploads = [one for one in self.uploads if one is not upload]
            if not torch.equal(*upload):
                self.wrong.append("words in flight were overwritten")


MODELS = {
    "gemma2": ("gemma2", {"num_hidden_layers": 1}),
    "linear layers": (
        "qwen3_5",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    ),
    "gemma2, 2 layers": ("gemma2", {"num_hidden_layers": 2}),
    "a mixture of experts": ("qwen3_moe", {"num_hidden_layers": 2, "mlp_only_layers": []}),
}


@pytest.fixture(
    scope="module",
    params=[*list(MODELS)[:2], *slow(*list(MODELS)[2:])],
)
def backends(request, tiny_model):
    """Two warm backends: the plain one, and the one with graphs of up to 10 tokens."""
    family, special = MODELS[request.param]
    directory, _ = tiny_model(family, **special, **SMALL)
    NotingQueue.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "queue_of", LateQueue if INTERPRETED else NotingQueue)
        # The checks at start are slow in the interpreter, and other tests cover them.
        patch.setattr(backend_module, "warmup_batches", lambda *a: iter(()))
        patch.setattr(TorchBackend, "run_all", lambda self, batches: None)
        patch.setattr(backend_module, "check_start", lambda *_: None)
        made = []
        for kernels, graph_tokens in (("torch", None), ("triton", GRAPH_TOKENS)):
            config = ModelConfig(
                str(directory),
                device=DEVICE,
                dtype="float32",
                attention=kernels,
                kernels=kernels,
                max_batch_tokens=24,
                max_model_len=48,
                kv_cache_size=2**22,
                cuda_graph_tokens=graph_tokens,
            )
            made.append(create_backend(plan_backend(directory, config)))
            made[-1].warmup()
    yield made
    for backend in made:
        backend.close()


def batches(page_size):
    """Yield a query in two chunks, items beside its end and after it; two batches are too large for
    a graph."""
    rng = np.random.default_rng(0)
    pages = Pages.shuffled(rng, 6, page_size).of(0, 24)
    query = int32(random_ids(rng, 20))
    for start, end in ((0, 5), (5, 16)):
        slots = page_slots(pages, start, end, page_size)
        chunk = Segment(query[start:end], start, 0, slots=slots, states=[(end - start, 3)])
        yield pack([chunk], [Prefix(start, pages, 3 if start else -1)])
    items = [random_ids(rng, n) for n in (1, 5)]
    behind = item_segments(items, 20, 0, 0, labels=LABELS)
    yield pack([Segment(query[16:], 16, 0), *behind], [Prefix(16, pages, 3)], num_top=1)
    other = item_segments([random_ids(rng, 3)], 0, 1, -1, labels=LABELS[:1])
    alone = item_segments([query[16:], query[16:18]], 16, 0, -1, labels=LABELS)
    yield pack([*alone, *other], [Prefix(16, pages, 3), Prefix(0, pages[:0])])
    many = item_segments([random_ids(rng, 3) for _ in range(5)], 16, 0, -1, labels=LABELS)
    yield replace(pack(many, [Prefix(16, pages, 3)]), need_lse=np.arange(5) % 2 == 0)


def assert_same(got, expected):
    np.testing.assert_allclose(got.label_logits, expected.label_logits, atol=2e-4)
    assert (got.lse is None) == (expected.lse is None)
    if expected.lse is not None:
        np.testing.assert_allclose(got.lse, expected.lse, atol=2e-4)
    if expected.top_ids is not None:
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)


@pytest.fixture
def routed(monkeypatch):
    """Numbers of choices that have a place, of each mixture of experts that was computed."""
    numbers, placed = [], mixture.placed

    def noting(chosen, experts, filled):
        order, ends = placed(chosen, experts, filled)
        if filled is not None:
            numbers.append(int(ends[-1]))
        return order, ends

    monkeypatch.setattr(mixture, "placed", noting)
    return numbers


def test_scores_equal_those_of_torch(backends, routed):
    """Launch each batch before the previous one is collected, as the engine does."""
    plain, graphs = backends
    runner = graphs.launcher
    assert isinstance(runner, GraphLauncher)
    every = list(batches(plain.limits.page_size))
    allocated = runner.queue.allocated
    expected = [plain.collect(plain.extend(batch)) for batch in every]
    under_way = graphs.extend(every[0])
    for index, scores in enumerate(expected, start=1):
        following = graphs.extend(every[index]) if index < len(every) else None
        assert_same(graphs.collect(under_way), scores)
        under_way = following
    assert (runner.replayed, runner.launched) == (3, 2)
    assert runner.queue.allocated == allocated, "pinning memory would wait for the device"
    assert not INTERPRETED or runner.queue.wrong == []
    experts = plain.plan.architecture.config.mixture
    # A graph on a card repeats work without calling the functions that queued it.
    called = [batch for batch in every if INTERPRETED or batch.num_tokens > GRAPH_TOKENS]
    rows = [len(side) for batch in called for side in (batch.token_ids, batch.score_rows)]
    assert routed == [experts.top_k * n for n in rows if experts], "no padding goes to an expert"


@pytest.fixture
def late(backends, monkeypatch):
    """The launcher of the backend with graphs, on a device that is late."""
    if not INTERPRETED:
        pytest.skip("a real device copies when it likes")
    runner = backends[1].launcher
    yield runner
    assert runner.queue.wrong == []


@pytest.mark.parametrize("backends", ["linear layers"], indirect=True)  # with the most tables
def test_what_a_batch_in_flight_uses_is_not_touched(backends, late, monkeypatch):
    """Whenever one batch is waited for, another one is launched meanwhile."""
    plain, _ = backends
    every = list(batches(plain.limits.page_size))
    expected = [plain.collect(plain.extend(batch)) for batch in every]
    finishes, scores = [late.launch(every[0])], []
    following = iter(every[1:])

    def meanwhile():
        finishes.extend(late.launch(batch) for batch in islice(following, 1))

    monkeypatch.setattr(late.queue, "during", meanwhile)
    for finish in finishes:
        scores.append(finish())
    assert len(scores) == len(every)
    for got, wanted in zip(scores, expected, strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("backends", ["gemma2"], indirect=True)
@pytest.mark.parametrize("replayed", [True, False])
def test_batches_after_a_failed_one_pin_no_memory(backends, late, monkeypatch, replayed):
    """Its words are in flight when it fails; the batches after it take its buffers."""
    every = list(batches(backends[0].limits.page_size))
    chosen = next(x for x in every if (x.num_tokens <= GRAPH_TOKENS) == replayed)
    allocated = late.queue.allocated
    monkeypatch.setattr(graph_launcher, "label_logits", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        late.launch(chosen)
    monkeypatch.undo()
    finish, last = [late.launch(batch) for batch in every[:2]]
    monkeypatch.setattr(torch.Tensor, "numpy", no_memory_of_the_host)
    with pytest.raises(MemoryError):
        finish()
    monkeypatch.undo()
    last()
    for finish in [late.launch(batch) for batch in every[:2]]:
        finish()
    assert late.queue.allocated == allocated


def no_memory(*_, **options):
    raise torch.OutOfMemoryError("simulated")


def no_memory_of_the_host(_):
    raise MemoryError("simulated")


def test_graphs_are_dropped_together(backends):
    """torch frees the cuBLAS workspace that all graphs use when any one of them is destroyed."""
    _, graphs = backends
    measured, served = NotingQueue.made
    assert len(measured.captures) == 1
    assert measured.alive == served.beside == 0, "the measured graph is gone before others come"
    before = len(served.captures)
    assert served.alive == before == len(graphs.launcher.buckets)
    graphs.launcher.capture()
    assert len(served.captures) == before, "none is captured a second time"
    assert served.alive == before


class WrongQueue(NotingQueue):
    """Captures nothing, as if all work had gone to another stream."""

    def capture(self, run):
        run()
        return lambda: None


@pytest.mark.parametrize("backends", ["gemma2"], indirect=True)
def test_a_graph_that_computes_something_else_does_not_serve(backends, monkeypatch):
    _, graphs = backends
    runner = graphs.launcher
    monkeypatch.setattr(runner, "queue", WrongQueue(runner.queue.device))
    runner.release()
    with pytest.raises(ConfigError, match=r"for 10 tokens does not compute .* --cuda-graph-tokens"):
        runner.capture()
