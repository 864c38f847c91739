"""Promise: the memory that a Pallas kernel declares is read from the traced program."""

import jax
import jax.numpy as jnp
import numpy as np

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.jax.attention import Pool
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.kernel import PallasAttend
from gpuscore.backends.jax.layout import ProgramSizes, TileSizes, buffer_length, divided
from gpuscore.backends.jax.programs import trace_programs
from gpuscore.backends.jax.weights import weight_shapes_of
from support.model_configs import QWEN3_06B
from tpu_code.kernel_memory import declared

SIZES = ProgramSizes(1024, 512, TileSizes(32, 16, 4, (256, 64)))
LAYERS, SLOTS, PAGE = 5, 512, 4


def test_memory_that_kernels_declare():
    config = QWEN3_06B | {"num_hidden_layers": LAYERS, "vocab_size": 512}
    architecture = read_architecture(RawConfig(config))
    cfg = architecture.config
    heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, 128)
    weights = weight_shapes_of(architecture, "bfloat16", "full")
    shape = (LAYERS, SLOTS // PAGE, PAGE, 2 * heads.width)
    pool = Pool(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    device = jax.devices("cpu")[0]
    traced = trace_programs(SIZES, cfg, weights, pool, PallasAttend(), heads, device)
    every, scored = declared(traced.extend.jaxpr)
    assert every == scored
    tables = divided(np.zeros(buffer_length(SIZES), np.int32), SIZES)
    lists = (*tables.every.bounds, tables.every.blocks)
    lists += (tables.prefix_lens, tables.block_starts, tables.pages)
    assert every.scalar == 4 * (3 + sum(map(len, lists)))  # layer, window, number of rows
    assert every.estimated
    assert every.vector > 2 * SIZES.tiling.own_keys * 2 * heads.width * 2
