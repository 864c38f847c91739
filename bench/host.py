"""Host time of a request around the device's work, part by part, measured without a device.

    make bench-host
    make bench-host ARGS='--workload 300 --rounds 500'

The engine, the launcher and the launches of the label head run as on CUDA, on CPU tensors of a
narrow model. The driver's calls and the replay of a graph return at once, and a batch that has no
graph is not computed. So what is left is the host's own work, for comparison with other versions of
it on the same machine: a device's work hides some of it, and its driver adds to it.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from baselines import LABELS
from gpu_work import WORKLOADS, Draws, all_batches
from report import Row, keep, table
from scenarios import Request, Workload

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.torch import loader
from gpuscore.backends.torch.attention.triton import TritonAttention
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.decoder import Decoder
from gpuscore.backends.torch.delta_net.layer import LinearAttention
from gpuscore.backends.torch.delta_net.states import StatePool
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.backends.torch.kernels import in_triton
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.queues import HostQueue
from gpuscore.backends.torch.work_thread import WorkThread
from gpuscore.config import RequestLimits
from gpuscore.engine.engine import Engine
from gpuscore.engine.scheduler import Scheduler
from gpuscore.errors import NonfiniteScore
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import BackendLimits
from gpuscore.types.results import label_logprobs

VOCAB = 151_936
LIMITS = BackendLimits(16_384, 64, 4096, 40_960, VOCAB)
UNLIMITED = RequestLimits(max_items=1 << 30, max_labels=1 << 30, max_request_tokens=1 << 30)
GRAPH_TOKENS = 4096
DRIVER = """
typedef unsigned long long address;
int cuPointerGetAttribute(address *out, int attribute, address at) { *out = at; return 0; }
int cuLaunchKernelEx(void *config, void *function, void **arguments, void **more) { return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
"""
# A model of as many operators whose arithmetic takes next to no time.
HIDDEN = 32
NARROW = {"hidden_size": HIDDEN, "intermediate_size": 32, "head_dim": 16}
NARROW |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB}
CAPABILITY, SHARED, THREADS = (9, 0), 227 * 1024, 1024
COLD = {name: workload for name, workload in WORKLOADS.items() if not workload.cached}


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
            driver.set_active(
                SimpleNamespace(
                    get_current_device=lambda: 0,
                    get_current_stream=lambda index: 0,
                    get_current_target=lambda: target,
                    launcher_cls=CudaLauncher,
                    utils=utils,
                )
            )
            with mock.patch.object(torch.cuda, "get_device_capability", return_value=CAPABILITY):
                yield


@contextmanager
def launcher_without_device() -> Iterator[GraphLauncher]:
    """Make the launcher of a narrow model with empty weights, on CPU tensors, with a graph of every
    size; its forward passes leave zeros."""
    from gpuscore_kernels.label_head import triton as label_head
    from graphs.models import EmptyFiles
    from support.model_configs import QWEN3_06B

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(driver_that_does_nothing())
        # CPU tensors are treated as tensors of Triton's interpreter.
        stack.enter_context(mock.patch.object(label_head, "arch_of", _hopper))
        stack.enter_context(mock.patch.object(loader, "_finite", _unchecked))
        dtype, device = torch.bfloat16, torch.device("cpu")
        architecture = read_architecture(RawConfig(QWEN3_06B | NARROW))
        files = EmptyFiles(Path(), architecture, "pt", device=device.type)
        form = loader.WeightFormat(dtype, device)
        weights = loader.Checkpoint(files, architecture, form).read()
        decoder = Decoder(architecture.config, weights, in_triton, own="triton")
        pool = KVPool(architecture.config, 1, LIMITS.page_size, dtype, device)
        pool.device = torch.device("cuda")  # by which attention chooses its tiles
        attention = TritonAttention(architecture.config, pool, steady=False)
        states = StatePool(architecture.config, 1, dtype, device)
        linear = LinearAttention(architecture.config, states, in_triton, "triton")
        launcher = GraphLauncher(decoder, attention, linear, HostQueue(), GRAPH_TOKENS)
        launcher._graphs = dict.fromkeys(launcher.buckets, lambda: None)
        hidden = torch.zeros(LIMITS.max_tokens, HIDDEN, dtype=dtype)
        launcher._forward = lambda *arguments: hidden
        yield launcher


# A mock's own call would take longer than what is measured.
def _hopper(tensor: Tensor) -> int:
    return 10 * CAPABILITY[0]


def _unchecked(what: str, tensor: Tensor) -> Tensor:
    return tensor


class HostBackend(TorchBackend):
    """The CUDA backend's threads, in front of a launcher without a device."""

    def __init__(self, launcher: GraphLauncher) -> None:
        self.device, self.launcher, self._limits = torch.device("cpu"), launcher, LIMITS
        self._thread = WorkThread(ThreadPoolExecutor(max_workers=1))
        self._uncollected = set()


class Parts:
    """Times the parts of one workload's requests; all take another request each time."""

    def __init__(self, workload: Workload, launcher: GraphLauncher) -> None:
        self.draws, self.launcher = Draws(workload, VOCAB, seed=1000), launcher
        self.times: dict[str, list[float]] = {}
        self.builder = PromptBuilder(None, LIMITS, UNLIMITED)
        self.engine = Engine(HostBackend(launcher), prefix_cache=False)

    def round(self) -> None:
        request, scheduler = self.draws.next(), Scheduler(LIMITS, prefix_cache=False)
        works = self._timed("plan and pack", lambda: all_batches(scheduler, request))
        batches = [work.batch for work in works]
        self._timed("tile tables", lambda: [*map(self.launcher.attention.tables, batches)])
        pending = self._timed("launch", lambda: [*map(self.launcher.launch, batches)])
        self._timed("collect", lambda: [finish() for finish in pending])
        self._request(self.draws.next())

    def _request(self, request: Request) -> None:
        begin, cpu = time.perf_counter(), time.process_time()
        asked = ScoreInput(*request, label_token_ids=LABELS)
        built = self._timed("build", lambda: self.builder.build(asked))
        try:
            result = self._timed("engine", lambda: self.engine.score(built).result())
        except NonfiniteScore:  # no kernel has written the answer, which is what was in memory
            return
        self._timed("log-probabilities", lambda: np.stack(label_logprobs(result)))
        self._note("whole request", time.perf_counter() - begin)
        self._note("whole request, CPU", time.process_time() - cpu)

    def _timed(self, part: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        made = run()
        self._note(part, time.perf_counter() - start)
        return made

    def _note(self, part: str, seconds: float) -> None:
        self.times.setdefault(part, []).append(seconds)


def measure(name: str, rounds: int, launcher: GraphLauncher) -> list[Row]:
    parts = Parts(COLD[name], launcher)
    for number in range(5 + rounds):
        if number == 5:  # all is compiled, and caches are full
            parts.times.clear()
        parts.round()
    parts.engine.close()
    rows = []
    for part, times in parts.times.items():
        median, least = (round(1e6 * of(times)) for of in (statistics.median, min))
        rows.append({"workload": name, "part": part, "median, us": median, "least, us": least})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", action="append", choices=list(COLD))
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with launcher_without_device() as launcher:
        for name in options.workload or COLD:
            rows += measure(name, options.rounds, launcher)
    print(table(rows))
    keep("host", {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
