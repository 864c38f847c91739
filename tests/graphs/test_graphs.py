"""Promise: on CUDA nothing is compiled after the warm-up, nothing waits between a batch's launch
and its collection, all work is on one stream, a graph repeats what would be launched, and memory
stays within what was counted at start. Launches are counted, those of foreign Triton code too.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from gpuscore.backends.common.batches import largest_batches
from gpuscore.backends.torch import decoder, graph_launcher
from gpuscore.backends.torch.queues import CudaQueue
from support.batches import in_one_batch, random_batch
from support.linear_layers import with_states
from support.model_configs import LLAMA_8B, MIXTURE, QWEN3_06B, QWEN35_08B
from support.slow import slow

pytest.importorskip("triton", reason="it is for Linux")

import triton
from triton import language as tl

from gpuscore_kernels.extend_attention import table
from graphs.device import device
from graphs.models import started

SMALL = QWEN3_06B | {"num_hidden_layers": 3, "max_position_embeddings": 1024}
PRM = SMALL | {"architectures": ["Qwen2ForProcessRewardModel"], "model_type": "qwen2"}
SETTINGS = {"cuda_graph_tokens": 48, "max_batch_tokens": 1024}
LABELS = [9693, 2152]


@dataclass
class Seen:
    """Work that a backend did.

    Attributes:
        graphs: the launches of each graph.
        short: those of the last graph of the model that was measured, with two layers.
        single: the launches of a batch that is too large for a graph.
        buckets: sizes that must have a graph.
    """

    problems: list[str]
    graphs: list[Counter]
    short: Counter
    single: Counter
    buckets: int

    @property
    def of_a_layer(self):
        return self.graphs[0] - self.short


def batches(plan, pages):
    """Yield batches of every kind and size that could compile or allocate something of its own."""
    rng, most, size = np.random.default_rng(0), plan.max_tokens, plan.pages.size
    yield in_one_batch([1] * 120, [[1] * 18] * 10, LABELS)
    query = min(2000, most // 2)
    yield in_one_batch([1] * query, [[1] * 20] * ((most - query) // 20), LABELS)
    for number in range(6):
        batch = random_batch(rng, min(pages, 4096) * size, size)
        if plan.pages.num_states:
            batch = with_states(rng, batch)
        if batch.num_tokens <= most:
            yield replace(batch, num_top=20 * (number % 3 == 0))
    for length in (1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 511, 1000):
        batch = in_one_batch([1] * (length // 2), [[1] * (length - length // 2)], LABELS)
        yield replace(batch, need_lse=np.array([length % 2 == 0]))
    yield from largest_batches(most, plan.max_model_len, size)


def examine(config=SMALL, settings=SETTINGS):
    """Start a model, warm it up and run batches, two at a time as the engine does."""
    with device() as (recorder, log), started(config, settings, recorder) as start:
        backend, before = start.backend, None
        measured = len(recorder.captures)
        recorder.peak = recorder.reserved
        backend.warmup()
        log.frozen, pinned = True, recorder.pinned
        for batch in batches(backend.plan, backend.limits.num_pages):
            launches, waits = len(recorder.launches), len(recorder.waits)
            pending = backend.extend(batch)
            pending.result()
            for wait in recorder.waits[waits:]:
                recorder.problem(f"the host waits before it collects: {wait}")
            if batch.num_tokens == 511:
                single = Counter(recorder.launches[launches:])
            if before is not None:
                backend.collect(before)
            before = pending
        backend.collect(before)
        problems = recorder.problems
        if recorder.peak > start.most:
            problems.append(f"{recorder.peak} bytes, at start {start.most} were counted")
        if recorder.pinned > pinned:
            problems.append(f"memory was pinned {recorder.pinned - pinned} times after the start")
        if not log.remembered or not recorder.replays:
            problems.append("nothing was launched with code that was remembered, or as a graph")
        graphs = [Counter(capture.launches) for capture in recorder.captures]
        buckets = len(backend.launcher.buckets)
        return Seen(problems, graphs[measured:], graphs[measured - 1], single, buckets=buckets)


LAYER = {
    "aten::mm": 4,
    "triton add_rms_norm_kernel": 2,
    "triton extend_attention_kernel": 1,
    "triton gated_kernel": 1,
    "triton qk_norm_rope_store_kernel": 1,
}
ROUTED = ("_softmax", "topk", "sum", "div", "ge", "masked_fill", "sort", "searchsorted")
ROUTED += ("floor_divide", "index_select", "scatter_", "_embedding_bag_forward_only")
MIXED = LAYER | {"aten::mm": 3, "aten::_grouped_mm": 2, "aten::arange": 4, "aten::_to_copy": 2}
MIXED |= {f"aten::{name}": 1 for name in ROUTED}


@pytest.mark.parametrize(
    ("config", "layer", "attention"),
    [
        (SMALL, LAYER, "triton"),
        (SMALL, LAYER | {"triton extend_attention_kernel": 0, "aten::zero_": 1}, "fa4"),
        (PRM, LAYER | {"aten::mm": 3, "aten::addmm": 1}, "triton"),  # its head has two layers
        *slow(
            (MIXTURE | {"num_experts": 16}, MIXED, "triton"),
            (LLAMA_8B | {"num_hidden_layers": 3}, LAYER, "triton"),
        ),
    ],
)
def test_a_sound_launcher(config, layer, attention):
    seen = examine(config, SETTINGS | {"attention": attention})
    assert seen.problems == []
    assert len(seen.graphs) == seen.buckets > 5
    assert seen.of_a_layer == Counter(layer)
    for graph in seen.graphs:
        assert_captured_as_launched(graph, seen.single)


@pytest.mark.slow
def test_linear_layers_are_captured():
    """A graph also keeps tails, if there are any; levels that a batch does not have are empty.

    A graph has two depths with walks that go on and others; a query and its items are one of each.
    """
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
    seen = examine(QWEN35_08B | sizes)
    assert seen.problems == []
    assert len(seen.graphs) == seen.buckets > 5
    added = {"aten::copy_": 1, "triton keep_tails_kernel": 3, "triton walk_kernel": 3 * 2}
    for graph in seen.graphs:
        assert graph - seen.single == Counter(added)


def assert_captured_as_launched(graph, single):
    """A graph ends in a copy of its rows; the words come before it, the label head behind it."""
    assert graph - single == Counter({"aten::copy_": 1})
    beside = single - graph
    assert beside.pop("upload") == beside.pop("download") == 1
    assert set(beside) <= {"triton label_logits_kernel", "aten::cat"}


def test_beside_a_graph_words_go_up_once_and_one_answer_comes_down():
    with device() as (recorder, _), started(SMALL, SETTINGS, recorder) as start:
        start.backend.warmup()
        before, replays = len(recorder.launches), recorder.replays
        start.backend.collect(start.backend.extend(in_one_batch([], [[1] * 9], LABELS)))
    assert recorder.replays == replays + 1
    kernels = ("label_logits", "slice_statistics", "merge_slices")
    assert Counter(recorder.launches[before:]) == Counter(
        ["upload", *(f"triton {name}_kernel" for name in kernels), "aten::cat", "download"]
    )


@pytest.mark.slow
def test_all_graphs_of_a_real_model():
    """The number stands in docs/explanation/element-wise.md."""
    seen = examine(QWEN3_06B, {})
    assert seen.problems == []
    assert {sum(graph.values()) for graph in seen.graphs} == {266}


# ---- defects ----


def wrapped(monkeypatch, module, name, before):
    """Call `before` with the arguments of module.name ahead of every call of it."""
    original = getattr(module, name)

    def run(*arguments, **options):
        before(*arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, run)


def in_the_forward_pass(do):
    """Return a function that plants `do(token positions)` between a forward pass's operators."""
    return lambda monkeypatch: wrapped(monkeypatch, decoder, "rotary_tables", do)


def words_are_not_aligned(monkeypatch):
    monkeypatch.setattr(table, "ALIGNED", 5)  # at which other sizes come to lie otherwise


def a_graph_writes_memory_that_is_freed(monkeypatch):
    capture = CudaQueue.capture

    def with_more(self, run):
        more = [torch.empty(8, device="cuda")]
        replay = capture(self, lambda: (run(), more[0].zero_()))
        more.clear()
        return replay

    monkeypatch.setattr(CudaQueue, "capture", with_more)


def a_launch_waits(monkeypatch):
    wrapped(monkeypatch, graph_launcher, "label_logits", lambda hidden, *_: hidden.cpu())


def uploads_have_a_stream(monkeypatch):
    upload = CudaQueue.upload

    def beside(self, host, to):
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            upload(self, host, to)

    monkeypatch.setattr(CudaQueue, "upload", beside)


def words_are_kept(monkeypatch):
    kept = []

    def keep(*_):
        kept.append(torch.empty(2**22, device="cuda"))

    wrapped(monkeypatch, graph_launcher, "label_logits", keep)


DEFECTS = [
    (words_are_not_aligned, "is compiled after the warm-up"),
    (
        in_the_forward_pass(lambda x: x.max().item()),
        "a number that the host reads inside a capture",
    ),
    (uploads_have_a_stream, "upload on another stream"),
    *slow(
        (in_the_forward_pass(lambda x: torch.empty(3, pin_memory=True)), "pinned memory is"),
        (a_graph_writes_memory_that_is_freed, "that has been freed since"),
        (a_launch_waits, "the host waits before it collects"),
        (words_are_kept, "bytes, at start"),
    ),
]


@pytest.mark.parametrize(("plant", "message"), DEFECTS)
def test_a_defect_is_found(monkeypatch, plant, message):
    plant(monkeypatch)
    problems = examine().problems
    assert any(message in problem for problem in problems), problems


@triton.jit
def foreign_kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, n), 0)


def test_foreign_launches_are_counted_and_captured_differs_from_launched(monkeypatch):
    def plant(positions):
        if len(positions) == 32:  # of one bucket
            foreign_kernel[(1,)](positions, 16)

    in_the_forward_pass(plant)(monkeypatch)
    seen = examine()
    wrong = [graph for graph in seen.graphs if graph["triton foreign_kernel"] == 1]
    assert 0 < len(wrong) < len(seen.graphs)
    with pytest.raises(AssertionError):
        assert_captured_as_launched(wrong[0], seen.single)
