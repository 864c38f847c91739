"""Promise: loops, branches and kernels are counted as they would run on a batch, from integers
alone; what cannot be known is an error."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.hf_config import RawConfig
from gpuscore.backends.jax.attention import Pool
from gpuscore.backends.jax.heads import Heads
from gpuscore.backends.jax.kernel import PallasAttend
from gpuscore.backends.jax.layout import ProgramSizes, TileSizes, buffer_length, divided, trips
from gpuscore.backends.jax.padding import padded
from gpuscore.backends.jax.programs import trace_programs
from gpuscore.backends.jax.weights import weight_shapes_of
from support.batches import random_batch
from support.model_configs import QWEN3_06B
from tpu_code.kernel_calls import declared
from tpu_code.tally import Product
from tpu_code.trips import Uncountable, count

PAGE, SLOTS = 4, 512
SIZES = ProgramSizes(1024, 512, TileSizes(32, 16, 4, (256, 64)))
LAYERS = 5


def tally_of(function, *arguments):
    shapes = [jax.ShapeDtypeStruct(np.shape(one), np.asarray(one).dtype) for one in arguments]
    return count(jax.jit(function).trace(*shapes).jaxpr, arguments)


def test_bounds_that_are_data():
    """A loop inside of a loop, as often as a table says."""

    def run(table, x):
        def row(index, x):
            return lax.fori_loop(0, table[index], lambda _, x: x @ x, x)

        return lax.fori_loop(0, table[3], row, x)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    table = np.array([2, 0, 5, 3], np.int32)
    jaxpr = jax.jit(run).trace(jax.ShapeDtypeStruct((4,), jnp.int32), x).jaxpr
    tally = count(jaxpr, [table, x])
    assert sorted(tally.loops.values()) == [3, 7]
    assert tally.products == {Product(8, 8, 8, "float32"): 7}


def test_two_loops_of_one_line_are_two():
    def run(bounds, x):
        for place in range(2):
            x = lax.fori_loop(0, bounds[place], lambda _, x: x + 1, x)
        return x

    tally = tally_of(run, np.array([3, 4], np.int32), np.float32(0))
    assert sorted((where.turns, times) for where, times in tally.loops.items()) == [
        ((), 3),
        ((1,), 4),
    ]


def test_only_the_branch_that_is_taken_counts():
    def run(which, x):
        return lax.switch(which, [lambda x: x @ x, lambda x: x, lambda x: x @ x @ x], x)

    x = np.zeros((4, 4), np.float32)
    product = Product(4, 4, 4, "float32")
    assert [tally_of(run, np.int32(at), x).products[product] for at in range(3)] == [1, 0, 2]


@pytest.mark.parametrize("different", [False, True])
def test_a_long_scan_is_run_whole_where_its_iterations_differ(different):
    """Three of the iterations are run where they agree; the last one may have another bound."""

    def run(bounds, x):
        def one(x, bound):
            return lax.fori_loop(0, bound, lambda _, x: x + 1, x), None

        return lax.scan(one, x, bounds)[0]

    bounds = np.full(40, 2, np.int32)
    bounds[39] += different
    tally = tally_of(run, bounds, np.float32(0))
    assert sorted(tally.loops.values()) == [40, 80 + different]


def test_a_bound_that_depends_on_numbers_is_refused():
    def run(x):
        return lax.while_loop(lambda x: x.sum() < 10, lambda x: x + 1, x)

    with pytest.raises(Uncountable, match="bound of a loop"):
        tally_of(run, np.zeros(4, np.float32))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program of a small model with the Pallas kernel, and its shapes."""
    folder = tmp_path_factory.mktemp("model")
    config = QWEN3_06B | {"num_hidden_layers": LAYERS, "vocab_size": 512}
    (architecture, fields) = (None, RawConfig(config))
    architecture = read_architecture(fields)
    assert folder.is_dir()
    cfg = architecture.config
    heads = Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, 128)
    weights = weight_shapes_of(architecture, "bfloat16", "full")
    shape = (LAYERS, SLOTS // PAGE, PAGE, 2 * heads.width)
    pool = Pool(jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    device = jax.devices("cpu")[0]
    traced = trace_programs(SIZES, cfg, weights, pool, PallasAttend(), heads, device)
    return traced.extend, heads, partial(lambda *leaves: jax.tree.leaves(leaves), weights, pool)


@pytest.mark.parametrize("seed", range(3))
def test_the_program_runs_as_often_as_its_tables_say(program, seed):
    """`layout.trips` counts from the tables; here the program itself is run on them."""
    traced, heads, arguments = program
    batch = random_batch(np.random.default_rng(seed), SLOTS, PAGE)
    buffer = padded(batch, SIZES, PAGE, 1)
    said = trips(divided(buffer, SIZES), SIZES)
    tally = count(traced.jaxpr, arguments(buffer))
    kernel = tally.kernels["attend"]
    assert kernel.calls == LAYERS
    blocks = [LAYERS - 1, 1] @ np.array(
        [
            said.own_blocks.sum() + said.prefix_blocks.sum(),
            said.scored_own_blocks.sum() + said.scored_prefix_blocks.sum(),
        ]
    )
    rows, keys = SIZES.tiling.rows * heads.group, SIZES.tiling.own_keys
    scores = Product(rows, heads.dim, keys, "bfloat16")
    assert kernel.products[scores] == blocks * heads.kv
    stored = [n for where, n in tally.loops.items() if where.frames[0][0] == "store"]
    assert sum(stored) == LAYERS * said.runs
    tiles = [n for where, n in tally.loops.items() if where.frames[1][0] == "with_outputs"]
    assert sum(tiles) == (LAYERS - 1) * sum(said.products) + sum(said.scored_products)


def test_memory_that_kernels_declare(program):
    traced, heads, _ = program
    every, scored = declared(traced.jaxpr)
    assert every == scored
    tables = divided(np.zeros(buffer_length(SIZES), np.int32), SIZES)
    lists = (*tables.every.bounds, tables.every.blocks)
    lists += (tables.prefix_lens, tables.block_starts, tables.pages)
    assert every.scalar == 4 * (3 + sum(map(len, lists)))  # layer, window, number of rows
    assert every.estimated
    assert every.vector > 2 * SIZES.tiling.own_keys * 2 * heads.width * 2
