"""Promise: pages take the memory that weights and the largest batch leave; that batch is measured,
and no other takes more."""

import logging
import mmap
import multiprocessing
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.base import OutOfMemory
from gpuscore.backends.common.batches import largest_batches
from gpuscore.backends.common.memory import HostMemory, available_bytes, cgroup_bytes
from gpuscore.backends.torch import plan as plan_module
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.devices import DeviceMemory
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.loader import WeightFormat, load_weights
from gpuscore.backends.torch.weights import shortened
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError
from support.memory import measured_and_taken
from support.models import make_model
from support.slow import slow

MIB = 2**20
WIDE = {  # a model whose batches take tens of megabytes, nearly all of them for attention
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LARGEST = 1024  # tokens of the largest batches
PAGE = 16 * 2 * 3 * 2 * 16 * 4  # bytes: tokens, sides, layers, KV heads, head size, float32

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak")


class SetMemory:
    """Memory with a fixed number of free bytes, in which every batch takes a fixed number."""

    def __init__(self, free, batch):
        self.left, self.batch, self.trims = free, batch, 0

    def free(self):
        return self.left

    def growth(self, *parts):
        for part in parts:
            part()
        return self.batch

    def trim(self):
        self.trims += 1


@pytest.fixture
def backend_of(tiny_model):
    """backend_of(memory, family, **options of ModelConfig)"""
    made = []

    def make(memory=None, family="qwen3", overrides=None, **options):
        directory, _ = tiny_model(family, **(overrides or {}))
        config = ModelConfig(
            str(directory), **{"dtype": "float32", "max_batch_tokens": 256, **options}
        )
        made.append(TorchBackend(plan_backend(directory, config), memory))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.mark.parametrize(
    ("memory", "options", "pages"),
    [
        (SetMemory(2**40, 5 * MIB), {}, 65536 // 16),  # a CPU has no use for more
        (SetMemory(5 * MIB + 100 * PAGE, 5 * MIB), {}, 70),
        (SetMemory(5 * MIB + 100 * PAGE, 5 * MIB), {"memory_fraction": 0.5}, 50),
        (SetMemory(5 * MIB + 100 * PAGE, 5 * MIB), {"kv_cache_size": 99 * PAGE + 1}, 99),
        (SetMemory(2**40, 5 * MIB), {"kv_cache_size": 5000 * PAGE}, 5000),
        (SetMemory(200 * PAGE, None), {}, 70),  # unknown growth: half is kept for a batch
    ],
)
def test_the_number_of_pages(memory, options, pages, backend_of, caplog):
    with caplog.at_level(logging.INFO, logger="gpuscore"):
        backend = backend_of(memory, **options)
    assert backend.limits.num_pages == pages
    assert {k.shape[1] for pair in backend.launcher.pool.layers for k in pair} == {pages * 16}
    assert len(backend.launcher.pool.layers) == len(backend.launcher.decoder.weights.layers) == 3
    assert memory.trims, "what the measurement took is given back"
    (line,) = (record.getMessage() for record in caplog.records)
    kind = "estimated" if memory.batch is None else "measured"
    assert re.fullmatch(
        rf"memory: weights 0.4 MiB, largest batch [\d.]+ MiB \({kind}\), "
        rf"KV cache {pages * PAGE / MIB:.1f} MiB: {pages} pages, {pages * 16} tokens",
        line,
    )


@pytest.mark.parametrize(
    ("memory", "options", "message"),
    [
        (
            SetMemory(5 * MIB + 47 * PAGE, 5 * MIB),  # 0.7 of 47 are 32
            {},
            "a prompt of --max-model-len 512 needs 528 tokens of KV cache, 0.4 MiB, 512 are "
            "available (the weights leave 5.6 MiB, the largest batch takes 5.0 MiB, 0.7 of the "
            "rest is for pages); lower --max-model-len or --max-batch-tokens",
        ),
        (
            SetMemory(5 * MIB, 6 * MIB),
            {},
            "a prompt of --max-model-len 512 needs 528 tokens of KV cache, 0.4 MiB, 0 are "
            "available (the weights leave 5.0 MiB, the largest batch takes 6.0 MiB, 0.7 of the "
            "rest is for pages); lower --max-model-len or --max-batch-tokens",
        ),
        (
            SetMemory(6 * MIB, 5 * MIB),
            {"kv_cache_size": 2 * MIB},
            "--kv-cache-size is 2.0 MiB, but the weights leave 6.0 MiB, the largest batch takes "
            "5.0 MiB; lower --kv-cache-size or --max-batch-tokens",
        ),
    ],
)
def test_too_little_is_refused_in_a_sentence(memory, options, message, backend_of):
    with pytest.raises(ConfigError) as error:
        backend_of(memory, **options)
    assert str(error.value) == message


def test_a_batch_that_does_not_fit(backend_of):
    class Full(SetMemory):
        def growth(self, *parts):
            raise OutOfMemory("no")

    with pytest.raises(ConfigError, match="--max-batch-tokens 77 does not fit into the memory"):
        backend_of(Full(2**40, 0), max_batch_tokens=77)


def test_what_cannot_fit_is_refused_before_the_weights_are_read(tiny_model, tmp_path, monkeypatch):
    """A container that is too small is detected from config.json alone."""
    directory, _ = tiny_model()
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "memory.max").write_text(str(50 * MIB))
    (tmp_path / "memory.current").write_text(str(49 * MIB))
    memory = HostMemory(cgroup=tmp_path)
    monkeypatch.setattr(plan_module, "memory_of", lambda device, ranks: memory)
    with pytest.raises(ConfigError, match=r"take 0\.4 MiB, and 0\.0 MiB of memory are free"):
        plan_backend(tmp_path, ModelConfig())


@linux_only
@pytest.mark.parametrize(("longest", "count"), [(1024, 3), *slow((1024, 10), (8192, 10))])
def test_no_batch_takes_more_than_was_measured(tiny_model, longest, count):
    """This holds, too, if the prompt is so long that rows and keys are measured in two parts."""
    directory, _ = tiny_model("qwen3", **WIDE | {"max_position_embeddings": longest})
    # A process of its own: in that of the tests, peaks depend on what other tests left in the heap.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        use = own.submit(measured_and_taken, directory, LARGEST, longest, count).result()
    assert use.parts == (2 if longest > 2 * LARGEST else 1)
    assert use.measured > 40 * MIB, "too little memory was measured for a comparison"
    assert use.taken < use.measured + use.pages


@linux_only
def test_the_peak_counts_though_it_is_over(tmp_path):
    memory = HostMemory()
    # Pages that no heap has: a backend of another test may have let it keep freed blocks.
    grown = memory.growth(lambda: mmap.mmap(-1, 40 * MIB).write(bytes(40 * MIB)))
    assert 40 * MIB <= grown < 4 * 40 * MIB + 16 * MIB
    blind = HostMemory(proc=tmp_path)
    ran = []
    assert blind.growth(lambda: ran.append(1)) is None
    assert ran == [1]


@linux_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_in_memory_once(tmp_path, dtype):
    """Not also as a mapped file or in another order, neither afterwards nor during the loading."""
    layers = {"hidden_size": 256, "intermediate_size": 3072, "num_hidden_layers": 12}
    model = make_model(tmp_path, "qwen3", **layers).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    del model
    made = plan_backend(tmp_path, ModelConfig(device="cpu", dtype=dtype))
    memory, held = HostMemory(), []
    memory.trim()
    before = memory.status("VmRSS")

    def load():
        held.append(
            load_weights(tmp_path, made.architecture, WeightFormat(made.dtype, made.device))
        )

    peak = memory.peak(load)
    memory.trim()
    assert made.weight_bytes > 50 * MIB
    assert peak < 1.8 * made.weight_bytes, "with freed blocks that the C library keeps"
    assert memory.status("VmRSS") - before < 1.25 * made.weight_bytes


@linux_only
def test_freed_memory_is_given_back():
    """Memory between blocks still in use is given back too, wherever in a worn heap they lie; the C
    library alone would keep it."""
    memory = HostMemory()
    blocks = [b"x" * (100_000 + n) for n in range(1000)]  # written: zeros may take no memory
    kept = blocks[::10]
    blocks.clear()
    before = memory.status("RssAnon")
    memory.trim()
    assert before - memory.status("RssAnon") > 40 * MIB
    assert len(kept) == 100


@linux_only
def test_unused_pages_cost_nothing(backend_of):
    """Unused pages read as zeros, in every dtype."""
    config = backend_of(SetMemory(2**40, 0)).plan.architecture.config
    memory = HostMemory()
    for dtype in (torch.float32, torch.bfloat16):
        before = memory.status("VmRSS")
        pool = KVPool(config, 100_000, 16, dtype, torch.device("cpu"))
        assert sum(k.nbytes + v.nbytes for k, v in pool.layers) > 500 * MIB
        assert memory.status("VmRSS") - before < 8 * MIB
        k, v = pool.read(0, torch.arange(7, 1_600_000, 300_001))
        assert not k.any()
        assert not v.any()


def test_a_shortened_model_has_a_layer_of_each_kind(backend_of):
    windows = {"qwen3": (None, None), "gemma3": (20, None, 20), "qwen3_moe": (None, None, None)}
    for family, expected in windows.items():
        backend = backend_of(SetMemory(2**40, 0), family)
        config, weights = shortened(
            backend.plan.architecture.config, backend.launcher.decoder.weights
        )
        assert config.windows == expected
        assert config.num_layers == len(weights.layers) == len(expected)
        assert weights.layers[-1] is backend.launcher.decoder.weights.layers[-1]
        assert len(weights.lm_head) == backend.plan.architecture.config.vocab_size
        if config.mixture is not None:
            assert config.mixture.layers == (True, False, True)


def test_the_largest_batches_are_within_the_limits(backend_of):
    """This holds, too, if a prompt is shorter than a batch, or a batch is a single token."""
    for max_batch_tokens, max_model_len in ((1, 512), (7, 1), (2048, 3), (63, 64)):
        backend = backend_of(
            SetMemory(2**40, 0), max_batch_tokens=max_batch_tokens, max_model_len=max_model_len
        )
        for batch in largest_batches(max_batch_tokens, max_model_len, 16):
            lengths = np.diff(batch.cu_seqlens)
            assert 0 < batch.num_tokens <= max_batch_tokens
            assert batch.prefix_lens[0] + lengths.max() == max_model_len
            assert batch.positions.max() == max_model_len - 1
            backend.collect(backend.extend(batch))


def test_memory_of_a_container(tmp_path):
    """The cgroup's limit counts if there is one, else the memory available on the machine."""
    assert cgroup_bytes(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert cgroup_bytes(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_bytes(tmp_path) == 700
    stat = "anon 100\nfile 90\ninactive_file 50\nactive_file 30\nunevictable 7\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert cgroup_bytes(tmp_path) == 780, "a checkpoint just read is no memory in use"
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:  5 kB\n")
    assert available_bytes(meminfo) == 5 * 1024
    assert available_bytes(tmp_path / "none") > 2**20


def test_memory_of_an_older_container(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("400\n")
    assert cgroup_bytes(tmp_path) == 600


def test_mapped_weights_are_not_free(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemAvailable: 500 kB\n")
    (tmp_path / "self" / "status").write_text("VmRSS:  300 kB\nRssFile:  120 kB\n")
    assert HostMemory(tmp_path, tmp_path).free() == 380 * 1024


def test_arithmetic_of_a_device(monkeypatch):
    """There is no CUDA here: torch's answers are set. The allocator takes 300, others take 40."""
    state = {"free": 1000, "reserved": 100, "peak": 100}
    calls = {
        "mem_get_info": lambda device: (state["free"], 2000),
        "memory_reserved": lambda device: state["reserved"],
        "max_memory_reserved": lambda device: state["peak"],
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
    memory = DeviceMemory(torch.device("cuda"))
    run = partial(state.update, free=1000 - 250 - 40, reserved=350, peak=400)
    assert memory.growth(run) == 340
    assert memory.free() == 710
