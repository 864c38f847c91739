"""Memory of the JAX backend's programs on an H100, told by XLA's compiler for CUDA without a card.

    pip install --no-deps jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    JAX_PLATFORMS=cpu PYTHONPATH=.:kernels python -P bench/jax_cuda.py DIRECTORY

DIRECTORY has a model's config.json. Nothing runs, and no kernel is chosen by timing it. With
`--device cpu` XLA compiles for this CPU, which needs neither package; so a test runs the bench.
"""

import argparse
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuscore.backends import plan_backend
from gpuscore.backends.common.plan import PAGE_SIZE, mebibytes
from gpuscore.backends.jax.backend import attends_of, pool_shapes
from gpuscore.backends.jax.plan import JaxPlan
from gpuscore.backends.jax.programs import XLA_OPTIONS, trace_programs
from gpuscore.backends.jax.weights import weight_shapes_of
from gpuscore.config import ModelConfig

H100 = """
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 12 minor: 9 } dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.755
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_memory_size: 84978434048 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
}
"""


def folder_of(package: str) -> Path:
    """Return a package's folder; raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed, see the top of this file")
    return Path(next(iter(spec.submodule_search_locations)))


def h100() -> Any:
    """Return a JAX device for which programs can be compiled, but not run."""
    assembler = folder_of("nvidia.cuda_nvcc")
    os.environ["PATH"] += f":{assembler / 'bin'}"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={assembler}"
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x1")
    return topology.devices[0]


def cpu() -> Any:
    import jax

    return jax.devices("cpu")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--pages", type=int, default=7000)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = h100() if options.device == "cuda" else cpu()
    config = ModelConfig(
        str(options.directory),
        backend="jax",
        device="cpu",
        dtype="bfloat16",
        max_batch_tokens=options.tokens,
        max_model_len=options.max_model_len,
        kv_cache_size=2**32,
    )
    plan = plan_backend(options.directory, config)
    assert isinstance(plan, JaxPlan)
    plan = replace(plan, device=device, pages=replace(plan.pages, size=PAGE_SIZE["cuda"]))
    pool = pool_shapes(plan, options.pages)
    weights = weight_shapes_of(plan.architecture, plan.dtype_name, plan.precision)
    setting = plan.architecture.config, weights, pool, attends_of("xla"), plan.heads, device
    traced = trace_programs(plan.sizes()[-1], *setting)
    print(f"weights {mebibytes(plan.weight_bytes)}, pool {mebibytes(pool.pages.size * 2)}")
    for name, program in (("batch", traced.extend), ("labels", traced.labels)):
        memory = program.lower(lowering_platforms=(options.device,)).compile(XLA_OPTIONS)
        analysis = memory.memory_analysis()
        fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        print(
            f"{name}: temporary {mebibytes(analysis.temp_size_in_bytes)}, results "
            f"{mebibytes(fresh)}, in place {mebibytes(analysis.alias_size_in_bytes)}"
        )


if __name__ == "__main__":
    main()
