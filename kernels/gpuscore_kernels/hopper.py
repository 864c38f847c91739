"""Kernels for Hopper that CuTe's compiler makes: FlashAttention 4's with our mask rule, and
quack-kernels' product with gate and up, which writes silu(gate) * up itself.

    TRITON_CACHE_DIR=DIR python -P -m gpuscore_kernels.hopper attention 128 2     # no card

The compiler is 237 MB and a kernel takes it 8 seconds, so the result is linked into a shared
library, which needs torch's CUDA runtime and `apache-tvm-ffi` only. It is kept beside Triton's
compiled code (`TRITON_CACHE_DIR`), under a name with the sizes and a digest of what made it.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpuscore_kernels.row_functions.build import run

Kernel: TypeAlias = Callable[..., None]

# An H100's, so that none has to be here.
ARCH = {
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "QUACK_ARCH": "90",
    "QUACK_CACHE_ENABLED": "0",
}
# The one function that the compiler's shared library has and its static library has not.
ERRORS = """
extern const char *cudaGetErrorString(int code);
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int code) {
  const char *parts[] = {cudaGetErrorString(code)};
  raise("RuntimeError", parts, 1);
}
"""
ROWS = 128  # of a tile of attention: tokens times the query heads of a KV head
KEYS = 128  # of a block
# Of products. Two groups of warps take turns on tiles; the two tiles of a cluster stand side by
# side, so that few rows leave none idle. The fastest of four on an H200.
TILES = {"tile_m": 128, "tile_n": 192, "cluster_m": 1, "cluster_n": 2, "pingpong": True}
# Of a product. Fewer are faster with `gated` behind a plain product: on an H200 0.0139 ms against
# 0.0157 for 300 rows of Qwen3-0.6B and 0.097 against 0.131 of Qwen3-8B, 0.0280 against 0.0231 and
# 0.281 against 0.270 for 1,000 (bench/LOG.md).
FEWEST_ROWS = 1000


def block_lists(numbers: Tensor, rows: int, group: int) -> tuple[Tensor, ...]:
    """List blocks of keys for each tile of rows, `group` of whose heads share keys, int32.

    Args:
        numbers: [2, keys] the first row that sees a key, and the row after the last.
        rows: the number of rows of the batch.
        group: see above.

    Returns:
        How many blocks each tile reads by the rule, their places in ascending order, and the same
        of the blocks that all its rows see. On a card nothing waits.
    """
    first = torch.arange(0, rows, ROWS // group, dtype=torch.int32, device=numbers.device)[:, None]
    behind = (first + ROWS // group).clamp(max=rows)
    begin, end = numbers
    full = ((begin <= first) & (end >= behind)).unflatten(1, (-1, KEYS)).all(2)
    some = ((begin < behind) & (end > first)).unflatten(1, (-1, KEYS)).any(2) & ~full
    lists: list[Tensor] = []
    for chosen in (some.int(), full.int()):
        places = chosen.argsort(dim=1, descending=True, stable=True).int()
        lists += chosen.sum(1, dtype=torch.int32), places
    return tuple(lists)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up, float32 inside and rounded once; for any sizes.

    Args:
        x: [T, K] in bfloat16, contiguous.
        weight: [2I, K] in bfloat16, contiguous: the gate's rows, then those of up, which are read
            in turn; 8 divides K, I.
    """
    out = x.new_empty(len(x), len(weight) // 2)
    if len(x):
        clusters = torch.cuda.get_device_properties(x.device).multi_processor_count // 2
        scheduler = clusters, None, 8, None, None, None  # and no plain product, lengths, scales
        load("product")(x, weight, None, None, (out, None, None), scheduler, *(None,) * 3)
    return out


def why_not(name: str, *sizes: int) -> str | None:
    """Return why `load` cannot succeed here, as far as packages tell, or None."""
    needed = ["tvm_ffi", *([] if library_of(name, *sizes).exists() else ["cutlass"])]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if not missing:
        return None
    return f"{', '.join(missing)} not installed here; pip install 'gpuscore[hopper]'"


@functools.cache
def load(name: str, *sizes: int) -> Kernel:
    """Return a kernel for these sizes, which is compiled if none is kept.

    It takes tensors as they are and launches on torch's current stream.

    Raises:
        BuildError: packages are missing, or the compilation fails.
    """
    library = library_of(name, *sizes)
    if not library.exists():
        # In a process of its own, whose packages the compilation changes.
        run(sys.executable, "-P", "-m", __name__, name, *map(str, sizes))
    import tvm_ffi

    # torch has loaded the runtime; its functions must be visible to what is loaded now.
    major = str(torch.version.cuda).split(".")[0]
    for other in (f"libcudart.so.{major}", tvm_ffi.libinfo.find_libtvm_ffi()):
        ctypes.CDLL(other, mode=ctypes.RTLD_GLOBAL)
    kernel: Kernel = tvm_ffi.load_module(library)["kernel"]
    return kernel


def library_of(name: str, *sizes: int) -> Path:
    """Return where a kernel's library is kept."""
    from triton import knobs  # only where Triton is

    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return Path(knobs.cache.dir, "-".join(["hopper", name, *map(str, sizes), f"{digest}.so"]))


def compile_attention(head_dim: int, group: int) -> Any:
    """Compile attention for bfloat16, this head size and this many query heads of a KV head."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import block_sparse_utils, utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    # Heads that share keys stand in one tile: as it is, it uses every list for several tiles.
    block_sparse_utils.sparse_tensor_m_block = lambda tile, heads, parts: tile

    @cute.jit
    def mask(request, head, row, key, lengths, numbers):  # type: ignore[no-untyped-def]
        """Evaluate the rule for a row: from the first that sees the key to the last."""
        row = utils.ssa_to_scalar(row)
        key = utils.ssa_to_scalar(key)
        seen = (row >= numbers[0][0, key]) & (row < numbers[0][1, key])
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    q = torch.empty(1, 8 * ROWS, 8 * group, head_dim, dtype=torch.bfloat16, device="cuda:0")
    k, v = (q.new_empty(1, 8 * ROWS, 8, head_dim) for _ in range(2))
    sizes = ((8,), (8, 7)) * 2
    lists = [q.new_empty(1, 1, *size, dtype=torch.int32) for size in sizes]
    given = {"mask_mod": mask, "aux_tensors": [q.new_empty(2, 8 * ROWS, dtype=torch.int32)]}
    given |= {"block_sparse_tensors": BlockSparseTensorsTorch(*lists, block_size=(ROWS, KEYS))}
    given |= {"tile_mn": (ROWS, KEYS), "pack_gqa": group > 1, "_arch": 90}
    _flash_attn_fwd.compile_cache.clear()
    _flash_attn_fwd(q, k, v, softmax_scale=head_dim**-0.5, **given)
    (compiled,) = _flash_attn_fwd.compile_cache.cache.values()
    return compiled


def compile_product() -> Any:
    """Compile the product with gate and up."""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_gated
    from quack.gemm_runtime import host

    plans: list[Any] = []
    host.get_max_active_clusters = lambda size: size  # there is no card to ask, nor to launch on
    host.launch_gemm = lambda plan, *given: plans.append(plan.compiled_fn)
    config = GemmConfig(**TILES, is_dynamic_persistent=False)
    given = {"activation": "swiglu", "store_preact": False, "concat_layout": ("B",)}
    x = torch.empty(8, 8, dtype=torch.bfloat16, device="cuda:0")
    gemm_gated(x, x.new_empty(16, 8).t(), tuned=False, config=config, **given)
    return plans[0]


def compile_ahead(name: str, *sizes: int) -> Path:
    """Compile a kernel and link it with what it needs of the compiler's own library."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    os.environ |= ARCH
    import nvidia_cutlass_dsl

    with FakeTensorMode():
        compiled = compile_product() if name == "product" else compile_attention(*sizes)
    library = library_of(name, *sizes)
    library.parent.mkdir(parents=True, exist_ok=True)
    static = Path(*nvidia_cutlass_dsl.__path__, "cu12/lib/libcuda_dialect_runtime_static.a")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        linked, compiled_object, errors = (
            Path(folder, f"kernel{end}") for end in (".so", ".o", ".c")
        )
        compiled.export_to_c(object_file_path=str(compiled_object), function_name="kernel")
        errors.write_text(ERRORS, encoding="utf-8")
        files = map(str, (linked, errors, compiled_object, static))
        run(os.environ.get("CC") or "gcc", "-shared", "-fPIC", "-o", *files)
        linked.replace(library)  # whole at once: other processes look for it
    return library


if __name__ == "__main__":
    print(compile_ahead(sys.argv[1], *map(int, sys.argv[2:])))
