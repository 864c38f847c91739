"""Compiles the programs of `--backend jax` for TPUs that are not there.

    make check-tpu                      # every program of Qwen3-0.6B, on v5e and v6e
    make check-tpu ARGS=--quick         # what make test-all compiles

A program fails if XLA refuses it, if the pages are not updated in place, if it has a scatter, slow
on a TPU, or if it takes more memory than the plan leaves it or the chip has. It needs libtpu
beside JAX, which `make check-tpu` installs in an environment of its own.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

# Without these, libtpu asks Google's metadata server about the machine, complains that it is no
# TPU, and lets only one process load it. JAX reads them when it is imported.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

from jax.experimental import topologies

from gpuscore.backends.jax import plan as planning
from gpuscore.backends.jax.backend import attends_of, pool_shapes
from gpuscore.backends.jax.layout import ProgramSizes
from gpuscore.backends.jax.plan import JaxPlan
from gpuscore.backends.jax.programs import ProgramModel, compile_programs
from gpuscore.backends.jax.weights import weight_shapes_of
from gpuscore.config import ModelConfig
from support.model_configs import QWEN3_06B

MEMORY = {"v5e": int(15.75 * 2**30), "v6e": int(31.25 * 2**30)}  # bytes that a program may use


def plan_of(chip: str) -> JaxPlan:
    """Return the plan that `gpuscore serve --backend jax` would make beside this chip."""
    topology = topologies.get_topology_desc(
        f"{chip}:1x1", platform="tpu", chips_per_host_bounds=(1, 1, 1)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(planning, "find_device", return_value=topology.devices[0]),
        mock.patch.object(planning, "free_memory", return_value=MEMORY[chip]),
    ):
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B))
        return planning.plan_backend(Path(folder), ModelConfig())


def check(plan: JaxPlan, chip: str, sizes: ProgramSizes) -> Iterator[str]:
    """Compile the two programs of a size; yield what is wrong with them."""
    most = plan.estimated_bytes(plan.sizes()[-1])
    pages = plan.count_pages(MEMORY[chip] - plan.weight_bytes, most, estimated=True)
    config = plan.architecture.config
    weights = weight_shapes_of(plan.architecture, plan.dtype_name, plan.precision)
    pool = pool_shapes(plan, pages)
    try:
        model = ProgramModel(config, weights, pool, attends_of(plan.attention), plan.heads)
        programs = compile_programs(sizes, model, plan.device)
    except Exception as error:  # noqa: BLE001  XLA's errors have no common base
        yield f"not compiled: {type(error).__name__}: {str(error)[:2000]}"
        return
    extend: Any = programs.extend
    memory, in_pool = extend.memory_analysis(), pages * plan.pages.page_bytes
    # The head that is the embedding is passed twice and exists once.
    twice = 2 * config.vocab_size * config.hidden_size * config.tie_word_embeddings
    held = memory.argument_size_in_bytes - twice
    print(f"  {programs.bytes / 2**20:.1f} MiB, {held / 2**30:.2f} GiB of weights and pages")
    if memory.alias_size_in_bytes < in_pool:
        yield f"the pages are not updated in place: {memory.alias_size_in_bytes} of {in_pool} bytes"
    if programs.bytes > most:
        yield f"a batch takes {programs.bytes} bytes, the plan leaves {most}"
    if held > 1.01 * plan.weight_bytes + in_pool:
        yield f"weights and pages take {held} bytes, planned: {plan.weight_bytes} + {in_pool}"
    if held + programs.bytes > MEMORY[chip]:
        yield f"{held + programs.bytes} bytes, {chip} has {MEMORY[chip]}"
    if " scatter(" in extend.as_text():
        yield "a scatter"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check-tpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest and the largest batch")
    options, failed = parser.parse_args(arguments), 0
    for chip in MEMORY:
        plan = plan_of(chip)
        every = plan.sizes()
        for sizes in [every[0], every[-1]] if options.quick else every:
            start = time.monotonic()
            print(f"{chip}, {sizes.tokens} tokens, {sizes.pages} pages", flush=True)
            wrong = list(check(plan, chip, sizes))
            print(*(f"  FAILED: {problem}\n" for problem in wrong), end="", sep="")
            print(f"  {time.monotonic() - start:.0f} s", flush=True)
            failed += bool(wrong)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
