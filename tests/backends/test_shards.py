"""Promise: the shards of the ranks are the model; memory is planned by a shard; what ranks cannot
divide or do is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from gpuscore.backends import plan_backend
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.estimate import plan_memory
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.common.shards import Shard
from gpuscore.backends.torch.ranks.messages import batch_of, words_of
from gpuscore.config import ModelConfig
from gpuscore.config.served import ServedConfig
from gpuscore.errors import ConfigError
from gpuscore.processes.replicas.placement import places_of_all
from gpuscore.types.batch import Prefix, Segment, pack
from support.backends import needs_jax
from support.batches import int32

WHOLE = ("norm", "o_bias", "down_bias")  # endings of parts that every rank reads
BY_COLUMNS = ("o", "down")


@pytest.mark.parametrize(
    ("family", "ranks", "overrides"),
    [
        ("qwen3", 2, {"attention_bias": True}),
        ("llama", 4, {}),  # of two KV heads
        ("llama", 3, {"num_attention_heads": 6, "num_key_value_heads": 3}),
        ("qwen3_classes", 2, {}),
    ],
)
def test_shards_together_are_the_model(tiny_model, family, ranks, overrides):
    directory, _ = tiny_model(family, **overrides)
    architecture = read_architecture(RawConfig.read(directory))
    config = architecture.config
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    whole = CheckpointFiles(directory, architecture, "np")
    files = [CheckpointFiles(directory, architecture, "np", shard=shard) for shard in shards]
    parts = dict(architecture.model_weights) | {
        part: f"model.layers.1.{name}" for part, name in architecture.layer_weights[1].items()
    }
    for part, name in parts.items():
        expected, got = whole.tensor(part, name), [file.tensor(part, name) for file in files]
        if part.endswith(WHOLE) or (part == "lm_head" and config.classes):
            assert all(np.array_equal(tensor, expected) for tensor in got)
            continue
        if part[0] in "kv" and ranks > config.num_kv_heads:  # heads that ranks share
            heads = expected.reshape(config.num_kv_heads, config.head_dim, *expected.shape[1:])
            expected = heads.repeat(ranks // config.num_kv_heads, axis=0).reshape(
                -1, *expected.shape[1:]
            )
        np.testing.assert_array_equal(np.concatenate(got, int(part in BY_COLUMNS)), expected)
        for shard, tensor in zip(shards, got, strict=True):
            assert tensor.shape == weight_shapes(shard.part_of(config))[part]


def test_memory_is_planned_for_a_rank(tiny_model):
    directory, _ = tiny_model("qwen3")
    single, halved = (
        plan_backend(directory, ModelConfig(str(directory), device="cpu", tensor_parallel=ranks))
        for ranks in (1, 2)
    )
    assert single.pages.page_bytes == 2 * halved.pages.page_bytes, "half of the KV heads"
    replicated = 4 * (3 * (2 * 48 + 2 * 16) + 48)  # float32 norms of three layers, and the last
    assert single.weight_bytes - replicated == 2 * (halved.weight_bytes - replicated)
    sizes = ModelConfig(device="cpu", tensor_parallel=2, kv_cache_size=2**20)
    limited = plan_backend(directory, sizes)
    assert limited.pages.exact_bytes == 2**19, "ranks share the memory of a CPU"


def test_memory_of_a_gpu_is_planned_for_a_rank(tiny_model):
    directory, _ = tiny_model("qwen3")
    sizes = {"kv_cache_size": 2**20, "tensor_parallel": 2}
    plan = plan_memory(directory, ModelConfig(**sizes), 2**33)
    assert plan.pages.exact_bytes == 2**20, "each rank has a GPU of its own"
    assert plan.weight_bytes == plan_backend(directory, ModelConfig(**sizes)).weight_bytes


def test_batches_arrive_as_they_were_sent():
    segments = [
        Segment(int32([5, 6, 7]), 20, 0, slots=int32([3, 4, -1])),
        Segment(int32([8]), 23, 0, parent=0, label_ids=int32([1, 2]), need_lse=True),
        Segment(int32([9, 9]), 0, 1, label_ids=int32([7])),
    ]
    pages = [Prefix(20, int32([4, 1])), Prefix(0, int32([]))]
    for batch in (pack(segments, pages, num_top=3), pack([], [])):
        arrived = batch_of(words_of(batch))
        assert arrived.num_top == batch.num_top
        for name in batch.__slots__:
            expected, got = np.asarray(getattr(batch, name)), np.asarray(getattr(arrived, name))
            assert expected.shape == got.shape
            assert expected.dtype == got.dtype
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"backend": "jax"}, "--backend is jax; supported: torch", marks=needs_jax),
        ({"deterministic": True}, "not supported with --deterministic"),
        ({"quantization": "w8a16"}, "--quantization is w8a16; supported: weights that are not"),
        ({"attention": "flashinfer"}, "--attention is flashinfer; supported: torch, triton"),
        ({"cuda_graph_tokens": 64}, "--cuda-graph-tokens is 64; supported: 0"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(tiny_model, options, message):
    directory, _ = tiny_model("qwen3")
    with pytest.raises(ConfigError, match=f"^--tensor-parallel 2: {message}"):
        plan_backend(directory, ModelConfig(device="cpu", tensor_parallel=2, **options))


@pytest.mark.parametrize(
    ("family", "ranks", "overrides", "message"),
    [
        ("llama", 3, {}, "the model's 4 attention heads cannot be divided equally"),
        (
            "llama",
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            "the model's 3 KV heads are neither a multiple nor a divisor of 2",
        ),
    ],
)
def test_models_that_ranks_cannot_divide_are_refused(tiny_model, family, ranks, overrides, message):
    directory, _ = tiny_model(family, **overrides)
    with pytest.raises(ConfigError, match=f"^--tensor-parallel {ranks}: {message}"):
        plan_backend(directory, ModelConfig(device="cpu", tensor_parallel=ranks))


def test_quantised_checkpoints_are_refused():
    directory = Path(__file__).parents[1] / "fixtures/quantized/qwen3-fp8-channel"
    with pytest.raises(ConfigError, match=r"^--tensor-parallel 2: the checkpoint is quantised"):
        plan_backend(directory, ModelConfig(device="cpu", tensor_parallel=2))


def test_several_models_are_refused(tmp_path):
    sought = [
        ServedConfig(name, ModelConfig(tensor_parallel=2), directory=tmp_path)
        for name in ("a", "b")
    ]
    with pytest.raises(ConfigError, match="^--tensor-parallel 2 is not supported with several"):
        places_of_all(sought, None)
