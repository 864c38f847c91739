"""Computation and exchanges of a rank of `--tensor-parallel`, for one batch of a dense model.

It follows `gpuscore/backends/torch/ranks/`: the ranks add up, in the model's dtype, the rows of the
embedding, of attention's output projection and of the MLP, each before anything else begins; from
the label head they exchange float32. Without CUDA graphs, so without their padding.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from cost_model.links import Exchange
from cost_model.published import Rowwise
from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.common.shards import Shard
from gpuscore.backends.torch.launcher import wanted_rows
from gpuscore.types.batch import PackedBatch

HALF, SINGLE, LONG = 2, 4, 8  # bytes of a number


def config_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **shape,
    }


def part_of(shape: Mapping[str, Any], ranks: int) -> Mapping[str, Any]:
    """Return the shape of the largest rank's part; raises ConfigError if it cannot be divided."""
    if ranks == 1:
        return shape
    whole = read_architecture(RawConfig(config_of(shape))).config
    part = Shard(ranks - 1, ranks).part_of(whole)  # the last share is never smaller than others
    return {
        **shape,
        "num_attention_heads": part.num_heads,
        "num_key_value_heads": part.num_kv_heads,
        "intermediate_size": part.intermediate_size,
        "vocab_size": part.vocab_size,
    }


def more_rowwise(
    batch: PackedBatch, shape: Mapping[str, Any]
) -> Iterator[tuple[str, Rowwise, int]]:
    """Yield kernels that only ranks have: they find their own tokens, and blank others' rows."""
    tokens, labels = batch.num_tokens, len(batch.label_token_ids)
    yield "other ranks' tokens", Rowwise(2 * LONG * tokens), 5
    yield "other ranks' rows", Rowwise(2 * HALF * tokens * shape["hidden_size"]), 1
    yield "other ranks' labels", Rowwise(2 * LONG * labels), 6


def exchanges(batch: PackedBatch, shape: Mapping[str, Any], item: int = HALF) -> list[Exchange]:
    """Return a batch's collectives in the order of their first call.

    Args:
        batch: of the whole request.
        shape: of the model.
        item: bytes of a number of the model.
    """
    row, layers = shape["hidden_size"] * item, shape["num_hidden_layers"]
    scored, wanted = len(batch.score_rows), len(wanted_rows(batch))
    found = [
        Exchange("embedding", "all-reduce", batch.num_tokens * row),
        Exchange("attention and MLP", "all-reduce", batch.num_tokens * row, 2 * (layers - 1)),
        Exchange("last layer", "all-reduce", scored * row, 2),
        Exchange("label logits", "all-reduce", len(batch.label_token_ids) * SINGLE),
        Exchange("log-sum-exp", "all-gather", wanted * SINGLE),
        Exchange("top ids", "all-gather", wanted * batch.num_top * LONG),
        Exchange("top logits", "all-gather", wanted * batch.num_top * SINGLE),
    ]
    return [one for one in found if one.bytes and one.count]
