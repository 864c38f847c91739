"""Host time of a request around the device's work, part by part, measured without a device.

    make bench-host
    make bench-host ARGS='--workload 300 --rounds 500'

The engine, the launcher and what prepares the label head's launches run as on CUDA, on CPU tensors
of a narrow model. A launch by Triton and the replay of a graph return at once, and a batch that has
no graph is not computed. So what is left is the host's own work, for comparison with other versions
of it on the same machine: a device's work hides some of it, and its driver adds to it.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import call
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from baselines import LABELS
from gpu_work import WORKLOADS, all_batches
from report import Row, keep, table
from scenarios import Request

from gpuscore.backends.common.architectures import read_architecture
from gpuscore.backends.common.raw_config import RawConfig
from gpuscore.backends.torch import loader
from gpuscore.backends.torch.attention.tiled import TritonAttention
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.backends.torch.decoder import Decoder
from gpuscore.backends.torch.graph_launcher import GraphLauncher
from gpuscore.backends.torch.kernels import in_triton
from gpuscore.backends.torch.kv_pool import KVPool
from gpuscore.backends.torch.operators import Operators
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
GRAPH_TOKENS = 4096
# A model of as many operators whose arithmetic takes next to no time.
HIDDEN = 32
NARROW = {"hidden_size": HIDDEN, "intermediate_size": 32, "head_dim": 16}
NARROW |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB}
WARM = 5  # rounds in which all is compiled and caches fill
COLD = {name: workload for name, workload in WORKLOADS.items() if not workload.cached}


@contextmanager
def launcher_without_device() -> Iterator[GraphLauncher]:
    """Make the launcher of a narrow model with empty weights, on CPU tensors, with a graph of every
    size; its forward passes leave zeros."""
    from gpuscore_kernels.cached_launch import CachedLaunch
    from gpuscore_kernels.label_head import triton as label_head
    from graphs.models import empty_files
    from support.model_configs import QWEN3_06B

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        for owner, name, stand_in in (  # a mock's own call would take longer than what is measured
            (CachedLaunch, "__call__", _nothing),
            # CPU tensors are treated as tensors of Triton's interpreter.
            (label_head, "arch_of", lambda tensor: 90),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (loader, "_finite", lambda what, tensor: tensor),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        dtype, device = torch.bfloat16, torch.device("cpu")
        architecture = read_architecture(RawConfig(QWEN3_06B | NARROW))
        files = stack.enter_context(empty_files(Path(), architecture, "pt", device=device.type))
        form = loader.WeightFormat(dtype, device)
        weights = loader.Checkpoint(files, architecture, form).read()
        decoder = Decoder(architecture.config, weights, Operators(in_triton, impl="triton"))
        pool = KVPool(architecture.config, 1, LIMITS.page_size, dtype, device)
        pool.device = torch.device("cuda")  # by which attention chooses its tiles
        attention = TritonAttention(architecture.config, pool, steady=False)
        launcher = GraphLauncher(
            decoder, attention, None, queue=HostQueue(), graph_tokens=GRAPH_TOKENS
        )
        launcher._graphs = dict.fromkeys(launcher.buckets, _nothing)
        hidden = torch.zeros(LIMITS.max_tokens, HIDDEN, dtype=dtype)
        launcher._forward = lambda *arguments: hidden
        yield launcher


def _nothing(*arguments: object) -> None:
    """Launch nothing."""


class HostBackend(TorchBackend):
    """The CUDA backend's threads, in front of a launcher without a device."""

    def __init__(self, launcher: GraphLauncher) -> None:
        self.device, self.launcher, self._limits = torch.device("cpu"), launcher, LIMITS
        self._thread = WorkThread(ThreadPoolExecutor(max_workers=1))
        self._uncollected = set()


def measure(name: str, rounds: int, launcher: GraphLauncher) -> list[Row]:
    """Time the parts of a workload's requests; all take another request each time."""
    draws, builder = (
        COLD[name].draws(VOCAB, seed=1000),
        PromptBuilder(None, LIMITS, RequestLimits()),
    )
    engine = Engine(HostBackend(launcher), prefix_cache=False)
    times: dict[str, list[float]] = {}

    def timed(part: str, run: Callable[[], Any], clock: Callable[[], float] = perf_counter) -> Any:
        start = clock()
        result = run()
        times.setdefault(part, []).append(clock() - start)
        return result

    def whole(request: Request) -> None:
        built = timed("build", lambda: builder.build(ScoreInput(*request, label_token_ids=LABELS)))
        # No kernel has written the answer, which is what was in memory.
        with suppress(NonfiniteScore):
            result = timed("engine", lambda: engine.score(built).result())
            timed("log-probabilities", lambda: np.stack(label_logprobs(result)))

    for number in range(WARM + rounds):
        if number == WARM:
            times.clear()
        request, scheduler = next(draws), Scheduler(LIMITS, prefix_cache=False)
        planned = timed("plan and pack", partial(all_batches, scheduler, request))
        batches = [batch for _, batch in planned]
        timed("tile tables", partial(list, map(launcher.attention.tables, batches)))
        pending = timed("launch", partial(list, map(launcher.launch, batches)))
        timed("collect", partial(list, map(call, pending)))
        timed("whole request", partial(whole, next(draws)))
        timed("whole request, CPU", partial(whole, next(draws)), process_time)
    engine.close()
    rows = []
    for part, taken in times.items():
        median, least = (round(1e6 * of(taken)) for of in (statistics.median, min))
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
