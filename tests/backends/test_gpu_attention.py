"""Promise: on a CUDA device attention in Triton and FlashInfer follows the mask rule, in the dtypes
of real models."""

from dataclasses import replace

import pytest
import torch

from gpuscore.backends.common.start_check import TREES, WITHOUT_QUERY, KnownRequests
from gpuscore.backends.torch.attention.choice import attention_factory, choose_attention
from gpuscore.backends.torch.graph_launcher import TOLERANCE
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.start_check import MaskedAttention
from gpuscore.errors import ConfigError
from gpuscore_kernels.extend_attention.reference import extend_attention
from support.attention_inputs import heads_alone, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QWEN3 = heads_alone(16, 8, 128)
MODELS = {
    "qwen3": QWEN3,
    "qwen2, 7 heads share keys": replace(QWEN3, num_heads=14, num_kv_heads=2, head_dim=64),
    "phi, heads of 96": replace(QWEN3, num_heads=32, num_kv_heads=32, head_dim=96),
    "gemma 2": replace(
        QWEN3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        windows=(40, None),
        attention_softcap=50.0,
        attention_scale=256**-0.5,
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("model", MODELS)
def test_attention_by_the_rule(model, name, dtype):
    config, device = MODELS[model], torch.device("cuda")
    try:
        choose_attention(name, config, device, dtype, False)
    except ConfigError as error:
        assert name != "triton"  # triton supports all of them
        pytest.skip(str(error))
    batch = KnownRequests(100, 100, 64, (*TREES, WITHOUT_QUERY)).packed()
    factory = attention_factory(name, extend_attention, False)
    tested = factory(config, KVPool(config, 1, 64, dtype, device)).prepare(batch)
    by_the_rule = MaskedAttention(config, device).prepare(batch)
    for layer in range(config.num_layers):
        q, k, v = (
            torch.randn(batch.num_tokens, heads, config.head_dim, dtype=dtype, device=device)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        expected = by_the_rule.run(layer, q.float(), k.float(), v.float())
        assert relative_error(tested.run(layer, q, k, v), expected) <= TOLERANCE[dtype]
