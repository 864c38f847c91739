"""Host time of an eager forward pass on CUDA, measured without a device.

    PYTHONPATH=tests python -P bench/host_time.py                    # Qwen3-0.6B, 300 tokens
    PYTHONPATH=tests python -P bench/host_time.py --rounds 50
    PYTHONPATH=tests python -P bench/host_time.py --fp8   # of an FP8 product around torch's

Everything that the host does up to the driver's call runs: the decoder, Triton's key and launcher
in C, or our cache in their place. The driver's calls return at once (a library of our own, built
with the C compiler), and tensors are torch's meta tensors. The operators of torch between the
launches are timed on CPU tensors of a narrow model of as many layers, because many operators on
meta tensors are written in Python. So these figures are for comparison with each other, not with a
device's.
"""

import argparse
import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, table

from gpuscore_kernels.cached_launch import CachedLaunch

if TYPE_CHECKING:
    from gpuscore.backends.torch.graph_launcher import GraphLauncher

DRIVER = """
int cuPointerGetAttribute(void *out, int attribute, unsigned long long pointer) {
  *(unsigned long long *)out = pointer;
  return 0;
}
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuGetErrorString(int error, const char **text) {
  *text = "none";
  return 0;
}
"""
# A model of as many operators whose arithmetic takes next to no time.
NARROW = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}
CAPABILITY, SHARED, THREADS = (9, 0), 227 * 1024, 1024
META, CPU = torch.device("meta"), torch.device("cpu")


@contextmanager
def driver_that_does_nothing() -> Iterator[None]:
    """Let Triton compile for sm_90 and launch into a driver whose calls return at once."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, libcuda_dirs, library_dirs
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "driver.c", Path(folder) / "libcuda.so.1"
        source.write_text(DRIVER)
        options = ["-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        subprocess.run([os.environ.get("CC", "gcc"), *options, str(source)], check=True)
        (Path(folder) / "libcuda.so").symlink_to(library)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        with mock.patch.dict(os.environ, {"TRITON_LIBCUDA_PATH": folder}):
            libcuda_dirs.cache_clear()
            library_dirs.cache_clear()
            sys.setdlopenflags(os.RTLD_LAZY)  # because our driver lacks functions
            utils = CudaUtils()
            utils.load_binary = lambda *arguments: (1, 1, 0, 0, THREADS)
            utils.get_device_properties = lambda index: {"max_shared_mem": SHARED}
            stub = SimpleNamespace(
                get_current_device=lambda: 0,
                get_current_stream=lambda index: 0,
                get_current_target=lambda: target,
                launcher_cls=CudaLauncher,
                utils=utils,
            )
            driver.set_active(stub)
            with mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY):
                yield


def launcher_of(
    config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    pages: tuple[int, int] = (64, 64),
    graph_tokens: int = 0,
) -> "GraphLauncher":
    """Return the graph launcher of a model with empty weights.

    Args:
        config: config.json's.
        device, dtype: of its tensors.
        pages: number of KV pages, and tokens of each.
        graph_tokens: the largest graph's.
    """
    from gpuscore.backends.common.architectures import read_architecture
    from gpuscore.backends.common.hf_config import RawConfig
    from gpuscore.backends.torch import loader
    from gpuscore.backends.torch.attention.triton import TritonAttention
    from gpuscore.backends.torch.decoder import Decoder
    from gpuscore.backends.torch.delta_net.layer import LinearAttention
    from gpuscore.backends.torch.delta_net.states import StatePool
    from gpuscore.backends.torch.graph_launcher import GraphLauncher
    from gpuscore.backends.torch.kernels import in_triton
    from gpuscore.backends.torch.kv_pool import KVPool
    from gpuscore.backends.torch.queues import HostQueue
    from graphs.models import EmptyFiles

    architecture = read_architecture(RawConfig(config))
    files = EmptyFiles(Path(), architecture, "pt", device=device.type)
    with mock.patch.object(loader, "_finite", lambda what, tensor: tensor):
        weights = loader.Checkpoint(files, architecture, loader.WeightFormat(dtype, device)).read()
    decoder = Decoder(architecture.config, weights, in_triton, own="triton")
    pool = KVPool(architecture.config, *pages, dtype, device)
    pool.device = torch.device("cuda")  # by which attention chooses its tiles
    attention = TritonAttention(architecture.config, pool, steady=False)
    states = StatePool(architecture.config, 1, dtype, device)
    linear = LinearAttention(architecture.config, states, in_triton, "triton")
    return GraphLauncher(decoder, attention, linear, HostQueue(), graph_tokens)


def forward_pass(
    launcher: "GraphLauncher", tokens: int, device: torch.device
) -> Callable[[], object]:
    """Return an eager forward pass of the launcher over empty tensors."""
    from gpuscore.backends.torch.buckets import Bucket
    from gpuscore.backends.torch.graph_launcher import Places

    places = Places.of(Bucket(tokens, 16, 16), launcher.attention.places)
    words = torch.zeros(places.end, dtype=torch.int32, device=device)
    return lambda: launcher._forward(places, words)


def measure(
    run: Callable[[], object], narrow: Callable[[], object], rounds: int
) -> list[dict[str, Any]]:
    """Time every launch of a forward pass by Triton and by our cache, and a narrow pass without
    any launch.

    The shortest of the repeated times counts, because other work on the machine only adds to it. A
    time includes one reading of the clock.
    """
    times: dict[tuple[str, str, int], int] = {}  # by way, kernel, number of the launch
    ours, number = CachedLaunch.__call__, itertools.count()

    def timed(way: str, how: Callable[..., None]) -> Callable[..., None]:
        def launch(cached: CachedLaunch, *arguments: Any) -> None:
            start = time.perf_counter_ns()
            how(cached, *arguments)
            took = time.perf_counter_ns() - start
            key = way, cached.kernel.__name__, next(number)
            times[key] = min(took, times.get(key, took))

        return launch

    ways = {"Triton": timed("Triton", CachedLaunch.by_triton), "ours": timed("ours", ours)}
    for way in ways.values():
        with mock.patch.object(CachedLaunch, "__call__", way):
            run()  # compiles
    times.clear()
    beside = float("inf")
    for _ in range(rounds):
        for way in ways.values():
            number = itertools.count()
            with mock.patch.object(CachedLaunch, "__call__", way):
                run()
        with mock.patch.object(CachedLaunch, "__call__", _none):
            start = time.perf_counter_ns()
            narrow()
            beside = min(beside, time.perf_counter_ns() - start)
    return list(_rows(times, list(ways), beside))


def _none(launch: CachedLaunch, *arguments: Any) -> None:
    """Launch nothing."""


def _rows(
    times: dict[tuple[str, str, int], int], ways: list[str], beside: float
) -> Iterator[dict[str, Any]]:
    kernels = sorted({kernel for _, kernel, _ in times})
    for kernel in (*kernels, "all"):
        chosen = {
            way: [t for (w, k, _), t in times.items() if w == way and kernel in (k, "all")]
            for way in ways
        }
        row = {"kernel": kernel, "launches": len(chosen[ways[0]])}
        yield row | {f"{way}, us": round(sum(x) / len(x) / 1e3, 1) for way, x in chosen.items()}
    for name, share in (("all together", 0.0), ("torch's operators between them", beside)):
        whole = {way: sum(t for (w, _, _), t in times.items() if w == way) for way in ways}
        spent = {way: share or took for way, took in whole.items()}
        yield {"kernel": name, "launches": 0} | {
            f"{w}, us": round(t / 1e3) for w, t in spent.items()
        }
    yield {"kernel": "the eager pass", "launches": 0} | {
        f"{way}, us": round((took + beside) / 1e3) for way, took in whole.items()
    }


def fp8_product(rounds: int) -> dict[str, Any]:
    """Count the calls of an FP8 product around torch's operator, and time them.

    The operator returns at once, and the tensors are on a CPU, where nothing asks for the card's
    compute capability.
    """
    from gpuscore.backends.torch.linear import Products, QuantizedLinear, QuantizedRows

    def eight_bits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 64).to(torch.float8_e4m3fn), torch.ones(count)

    products, linear = Products(impl="triton"), QuantizedLinear(*eight_bits(32), None)
    rows, result = QuantizedRows(*eight_bits(16), torch.bfloat16), torch.zeros(16, 32)
    kinds: Counter[str] = Counter()

    def operator(*arguments: object) -> torch.Tensor:
        return result

    with mock.patch.object(torch, "_scaled_mm_v2", operator):
        sys.setprofile(lambda frame, kind, what: kinds.update([kind]))
        products(linear, rows)
        sys.setprofile(None)
        times = timeit.repeat(lambda: products(linear, rows), number=1000, repeat=rounds)
    # Without the calls of the stand-in and of the last line above.
    calls = {"Python calls": kinds["call"] - 1, "calls of C": kinds["c_call"] - 1}
    return {"product": "FP8", **calls, "us": round(min(times) * 1e3, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--fp8", action="store_true", help="the product of FP8 instead")
    options = parser.parse_args()
    from support.model_configs import QWEN3_06B

    torch.set_num_threads(1)
    if options.fp8:
        with torch.inference_mode():
            print(table([fp8_product(options.rounds)]))
        return 0
    with torch.inference_mode(), driver_that_does_nothing():
        whole = launcher_of(dict(QWEN3_06B), META, torch.bfloat16)
        run = forward_pass(whole, options.tokens, META)
        few = launcher_of(QWEN3_06B | NARROW, CPU, torch.float32)
        narrow = forward_pass(few, 16, CPU)
        rows = measure(run, narrow, options.rounds)
    print(table(rows))
    keep("host-time", {"tokens": options.tokens, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
