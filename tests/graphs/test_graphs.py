"""Promise: on a CUDA device the runner captures, launches and allocates as it was designed to, and
the check that proves it without a device misses none of the defects planted here."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.torch import backend as backend_module
from gpuscore.backends.torch import decoder, kernels, mixture
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.backends.torch.queues import CudaQueue
from gpuscore.config import ModelConfig
from support.kernels import choose_anew, planted
from support.quantized import section

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton, which is for Linux", allow_module_level=True)

from gpuscore_kernels import cached_launch
from gpuscore_kernels.add_rms_norm import triton as norm_module
from gpuscore_kernels.expert_mlp import triton as mlp_module
from gpuscore_kernels.extend_attention import launch as launch_module
from gpuscore_kernels.extend_attention import table
from gpuscore_kernels.extend_attention import triton as attention_module
from gpuscore_kernels.qk_norm_rope_store import triton as store_module
from graphs.check import changes, read_baseline
from graphs.device import H200, device
from graphs.examine import examine
from graphs.models import MIXTURE, QWEN3_06B, Model

# The heads and rows of Qwen3-0.6B, so that compiled kernels are shared with its examination. So few
# layers that an H200's memory holds over 2^31 elements of keys in each.
SMALL = Model(
    "small",
    QWEN3_06B | {"num_hidden_layers": 3, "max_position_embeddings": 1024},
    {"cuda_graph_tokens": 48, "max_batch_tokens": 1024},
    large_pool=True,
)


@pytest.fixture(scope="module")
def sound():
    return examine(SMALL)


@pytest.mark.slow
def test_nothing_is_found_without_a_defect(sound):
    assert sound.problems == []
    assert sound.counts["graphs"] == 8
    assert sum(sound.counts["launches of a layer"].values()) == 9


def test_a_layer_in_int8_quantises_in_launches_that_it_has_anyway():
    """Only the results of attention are quantised by a launch of their own."""
    counts = read_baseline()["Qwen3-0.6B, int8, 4 layers"]["launches of a layer"]
    assert counts.pop("triton quantize_rows_kernel") == 1
    assert sum(counts.values()) == 9


@pytest.mark.slow
def test_all_models():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "graphs.check"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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


def the_warm_run_is_left_out(monkeypatch):
    """Capture kernels that no run before has compiled."""
    warps = cached_launch.row_warps

    def capture(self, run):
        with monkeypatch.context() as patch:
            patch.setattr(cached_launch, "row_warps", lambda block: 2 * warps(block))
            choose_anew(patch, norm_module)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_memory):
                run()
        return graph.replay

    monkeypatch.setattr(CudaQueue, "capture", capture)


def a_graph_reads_words_that_are_freed(monkeypatch):
    capture = GraphLauncher._capture

    def with_a_copy(self, bucket):
        words = self._words
        self._words = words.clone()
        capture(self, bucket)
        self._words = words

    monkeypatch.setattr(GraphLauncher, "_capture", with_a_copy)


def rotary_tables_are_kept(monkeypatch):
    kept, tables = [], decoder.rotary_tables

    def keep(positions, **frequencies):
        kept.append(tables(positions, **frequencies))
        return kept[-1]

    monkeypatch.setattr(decoder, "rotary_tables", keep)


def a_bucket_is_left_out(monkeypatch):
    capture = GraphLauncher._capture
    monkeypatch.setattr(
        GraphLauncher,
        "_capture",
        lambda self, bucket: bucket == self.buckets[1] or capture(self, bucket),
    )


def one_bucket_differs(monkeypatch):
    wrapped(monkeypatch, decoder, "rotary_tables", lambda x: len(x) == 32 and x.clone())


def a_page_more_is_allocated(monkeypatch):
    init = backend_module.KVPool.__init__

    def larger(self, config, num_pages, *others):
        init(self, config, num_pages + 1, *others)

    monkeypatch.setattr(backend_module.KVPool, "__init__", larger)


def weights_are_kept_twice(monkeypatch):
    kept, load = [], backend_module.load_weights

    def twice(*arguments):
        kept.append(load(*arguments).embed.clone())
        return load(*arguments)

    monkeypatch.setattr(backend_module, "load_weights", twice)


def a_launch_waits(monkeypatch):
    wrapped(monkeypatch, GraphLauncher, "_answer", lambda launcher, *_: launcher._words.cpu())


def only_the_largest_graph_is_counted(monkeypatch):
    count = backend_module.TorchBackend._graph_bytes

    def largest_only(self, layers):
        monkeypatch.setattr(self.launcher, "capture", lambda: 0)
        return count(self, layers)

    monkeypatch.setattr(backend_module.TorchBackend, "_graph_bytes", largest_only)


def layers_of_graphs_are_not_counted(monkeypatch):
    count = backend_module.TorchBackend._graph_bytes
    monkeypatch.setattr(
        backend_module.TorchBackend,
        "_graph_bytes",
        lambda self, layers: count(self, self.plan.part.num_layers),
    )


DEFECTS = [
    (words_are_not_aligned, "is compiled after the warm-up"),
    (the_warm_run_is_left_out, "add_rms_norm_kernel is compiled inside capture"),
    (in_the_forward_pass(lambda x: x.max().item()), "a number that the host reads inside capture"),
    (in_the_forward_pass(lambda x: x.max().tolist()), "a copy to the host inside capture"),
    (in_the_forward_pass(lambda x: torch.nonzero(x)), "nonzero, whose result's length"),
    (in_the_forward_pass(lambda x: x[x > 3]), "whose result's length"),
    (in_the_forward_pass(lambda x: x.cpu()), "a copy to the host inside capture"),
    (in_the_forward_pass(lambda x: torch.ones(3).to("cuda")), "a copy of pageable memory inside"),
    (in_the_forward_pass(lambda x: torch.empty(3, pin_memory=True)), "pinned memory is allocated"),
    (in_the_forward_pass(lambda x: torch.cuda.synchronize()), "synchronize inside capture"),
    (in_the_forward_pass(lambda x: torch.cuda.empty_cache()), "empty_cache inside a capture"),
    (a_graph_reads_words_that_are_freed, "that has been freed since"),
    (rotary_tables_are_kept, "still used after it"),
    (a_bucket_is_left_out, "7 graphs were captured for 8 buckets"),
    (one_bucket_differs, "graphs of different buckets have different launches"),
    (a_page_more_is_allocated, "the KV pool takes"),
    (weights_are_kept_twice, "the weights take"),
    (only_the_largest_graph_is_counted, "executables of graphs take"),
    (layers_of_graphs_are_not_counted, "executables of graphs take"),
    (a_launch_waits, "the host waits before it collects"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "message"), DEFECTS, ids=[message.replace(" ", "-") for _, message in DEFECTS]
)
def test_a_defect_is_found(monkeypatch, plant, message):
    plant(monkeypatch)
    problems = examine(SMALL, quick=True).problems
    assert any(message in problem for problem in problems), problems


@pytest.mark.slow
def test_graphs_that_are_measured_after_the_batches_are_found(monkeypatch):
    """Before a capture torch empties its cache, and with it what the largest batches took."""
    capture, measure, launchers = GraphLauncher.capture_largest, backend_module.measure, []

    def batches_first(memory, run, **options):
        return measure(memory, lambda: (run(), capture(launchers[-1])), **options)

    larger = replace(SMALL, settings={**SMALL.settings, "cuda_graph_tokens": 512})
    monkeypatch.setattr(GraphLauncher, "capture_largest", lambda self: launchers.append(self))
    monkeypatch.setattr(backend_module, "measure", batches_first)
    (problem,) = examine(larger, quick=True).problems
    assert "bytes more than planned" in problem


SMALL_MIXTURE = replace(
    SMALL, name="small mixture", config=MIXTURE | {"num_hidden_layers": 3, "num_experts": 16}
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("route", "bincount, whose result's length depends on the numbers inside capture"),
        ("expert_mlp", "a copy to the host inside capture"),
    ],
)
def test_a_mixture_that_asks_the_device_is_found(monkeypatch, name, message):
    """The reference reads on the host how many rows each expert has."""
    right = getattr(mixture, name)

    def on_the_host(*arguments, **options):
        return right(*arguments, **options | {"impl": "reference"})

    monkeypatch.setattr(mixture, name, on_the_host)
    problems = examine(SMALL_MIXTURE, quick=True).problems
    assert any(message in problem for problem in problems), problems


# Over 2^31 elements of gate and up projections in a layer, as in models of 480B parameters.
LARGE_EXPERTS = replace(
    SMALL_MIXTURE,
    name="large experts",
    config=SMALL_MIXTURE.config
    | {"num_experts": 160, "moe_intermediate_size": 2560, "hidden_size": 6144},
)


@pytest.mark.slow
def test_offsets_of_experts_are_wide(monkeypatch, tmp_path):
    assert examine(LARGE_EXPERTS, quick=True).problems == []
    change = ("expert.to(tl.int64) * (2 * INNER)", "expert * (2 * INNER)")
    with planted(monkeypatch, mlp_module, *change, tmp_path):
        problems = examine(LARGE_EXPERTS, quick=True).problems
    assert any("an offset into %gate_up" in problem for problem in problems), problems


@pytest.mark.slow
def test_a_launch_more_per_layer_is_found(monkeypatch, sound):
    monkeypatch.delitem(kernels._KERNELS, decoder.gated)
    changed = changes(examine(SMALL, quick=True).counts, sound.counts)
    assert any("launches of a layer" in text and "gated" in text for text in changed)


NARROW = [
    (store_module, "tl.load(slots + row).to(tl.int64)", "tl.load(slots + row)", "%k_pages"),
    (attention_module, "tl.load(entry).to(tl.int64)", "tl.load(entry)", "%pool_k"),
    (attention_module, "wide_head = kv_head.to(tl.int64)", "wide_head = kv_head", "%pool_v"),
    (
        attention_module,
        "from_k = pool_k_head + slot * stride_pks",
        "from_k = pool_k_head + (slot.to(tl.int32) * stride_pks).to(tl.int64)",
        "%pool_k",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "old", "new", "argument"), NARROW)
def test_an_offset_of_32_bits_is_found(monkeypatch, tmp_path, module, old, new, argument):
    with planted(monkeypatch, module, old, new, tmp_path):
        if module is attention_module:
            kernel = sys.modules[module.__name__].extend_attention_kernel
            monkeypatch.setattr(launch_module, "extend_attention_kernel", kernel)
            choose_anew(monkeypatch, launch_module)
        problems = examine(SMALL, quick=True).problems
    assert any(f"an offset into {argument}" in problem for problem in problems), problems


def test_an_unaligned_slice_has_another_key():
    with device(H200) as (_, log):
        x, weight = torch.empty(4, 1024, device="cuda"), torch.empty(1024, device="cuda")
        wide = torch.empty(4, 1028, device="cuda")
        norm = norm_module.add_rms_norm
        norm(x, None, weight, 1e-6, False)
        norm(x[1:], None, weight, 1e-6, False)
        assert len(log.compiled) == 1
        norm(wide[:, 1:1025], None, weight, 1e-6, False)
        aligned, other = log.compiled
    assert aligned != other


@pytest.mark.parametrize(
    ("quantization", "setting", "tokens"),
    [(None, None, 4096), ("int8", None, 4096), ("fp8", None, 8192), ("fp8", 64, 64)],
)
def test_fp8_whose_products_cost_the_host_more_has_larger_graphs(
    tmp_path, quantization, setting, tokens
):
    added = {} if quantization is None else {"quantization_config": section(quantization)}
    model = replace(SMALL, config=SMALL.config | added)
    options = {"device": "cuda", "cuda_graph_tokens": setting}
    with device(H200):
        plan = plan_backend(model.write(tmp_path), ModelConfig(str(tmp_path), **options))
    assert plan.graph_tokens == tokens
