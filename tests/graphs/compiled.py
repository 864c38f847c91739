"""Compiles the Triton kernels that real models launch, for every architecture, without a GPU.

    make check-kernels                     # all, with the Triton of the tests and with the image's
    make check-kernels ARGS='--arch 90'    # for one architecture

Models start and run batches on a device that is not there, which notes what Triton would compile.
Triton's wheel has the assembler. A kernel fails that does not compile, that needs more shared
memory than a block may have, or that spills more registers to the stack than is allowed here.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

import gpuscore_kernels
from gpuscore_kernels.launch import ARCHES
from graphs.device import Request, device
from graphs.models import started
from support.batches import in_one_batch
from support.model_configs import LLAMA_1B, LLAMA_8B, QWEN3_06B, QWEN35_08B

SHARED = {80: 163, 89: 99, 90: 227, 120: 99}  # KiB of shared memory that a block may have
SMALL = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


# Configurations, and settings beside those of `requests`.
MODELS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "7 heads": (
        LLAMA_8B | {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
        {},
    ),
    "Qwen3-0.6B": (QWEN3_06B, {}),
    "Qwen3-0.6B fa4": (QWEN3_06B, {"attention": "fa4"}),
    "Qwen3-0.6B float32": (QWEN3_06B, {"dtype": "float32"}),
    "Llama-3.2-1B": (LLAMA_1B, {}),
    "heads of 96": (LLAMA_8B | {"head_dim": 96, "num_key_value_heads": 32}, {}),
    "Gemma 2 2B": (GEMMA, {}),
    "Gemma 2 2B float32": (GEMMA, {"dtype": "float32"}),
    "Qwen3.5-0.8B": (QWEN35_08B, {}),
}


def requests(arch: int, models: Sequence[str]) -> Iterator[tuple[str, Request]]:
    """Yield each kernel with each of its compile-time choices once, and the first model with it."""
    seen = set()
    for name in models:
        config, settings = MODELS[name]
        with device((arch // 10, arch % 10)) as (recorder, log):
            options = {"max_batch_tokens": 1024, "cuda_graph_tokens": 0} | settings
            with started({**config, **SMALL}, options, recorder) as start:
                for items in ([[1] * 18] * 10, [[1] * 9] * 60):
                    batch = in_one_batch([1] * 120, items, [9, 2])
                    start.backend.collect(start.backend.extend(batch))
            for request in log.compiled:
                if (choice := choice_of(request)) not in seen:
                    seen.add(choice)
                    yield name, request


def choice_of(request: Request) -> tuple[Any, ...]:
    """Return what makes other code, without what Triton alone reads from numbers and addresses."""
    types = tuple(t for t in request.source.signature.values() if t.startswith("*"))
    return request.function.__name__, str(constants_of(request)), types


def constants_of(request: Request) -> dict[str, Any]:
    chosen = {p.name: p.num for p in request.function.params if p.is_constexpr}
    return {name: request.source.constants.get((number,)) for name, number in chosen.items()}


def stack_allowed(request: Request, arch: int) -> int:
    """Return the bytes of stack that a kernel may take."""
    if request.function.__name__ == "systems_kernel":  # products of 64 x 64 float32, without wgmma
        return 64 if arch in (89, 120) else 0
    if request.function.__name__ != "extend_attention_kernel":
        return 0
    constants = constants_of(request)
    if request.source.signature["q"] == "*fp32":  # for comparison only
        return 160
    if constants["GROUP"] == 7:  # which no power of two divides
        return 32 if arch == 80 else 0
    return 128 if constants["D"] == 256 and arch == 90 else 0  # and a tenth faster so


CHOSEN: list[tuple[str, Request, int]] = []  # of all forked processes


def checked(number: int) -> tuple[str, bool]:
    """Compile a kernel; return a line about it and whether it may be shipped."""
    model, request, arch = CHOSEN[number]
    constants = " ".join(f"{name}={value}" for name, value in constants_of(request).items())
    line = f"sm_{arch} {request.function.__name__} of {model} ({constants}): "
    try:
        made = triton.compile(
            request.source, GPUTarget("cuda", arch, 32), options=dict(request.options)
        )
    except Exception as error:  # noqa: BLE001  Triton's errors have no common base
        return f"{line}FAILED: {type(error).__name__}: {error}", False
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        command = (knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name)
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(x) for x in re.findall(r"REG:(\d+) STACK:(\d+)", said)[0])
    shared, allowed = made.metadata.shared, stack_allowed(request, arch)
    line += f"{registers} registers, {stack} B stack, {shared} B shared"
    if stack <= allowed and shared <= SHARED[arch] * 1024:
        return line, True
    return f"{line}: FAILED, allowed are {allowed} B stack, {SHARED[arch]} KiB shared", False


def written() -> set[str]:
    """Return the names of all kernels."""
    files = Path(gpuscore_kernels.__file__).parent.glob("*/triton.py")
    return {name for path in files for name in re.findall(r"def (\w+_kernel)\(", path.read_text())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check-kernels")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHES)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--only", default="", help="kernels with this text in their names")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for arch in options.arch or ARCHES:
        for model, request in requests(arch, options.model or list(MODELS)):
            if options.only in request.function.__name__:
                CHOSEN.append((model, request, arch))
    # Triton is not safe to fork once it has compiled, which it has not here.
    workers = ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("fork"))
    failed = 0
    with workers as pool:
        for line, good in pool.map(checked, range(len(CHOSEN))):
            print(line, flush=True)
            failed += not good
    left = written() - {request.function.__name__ for _, request, _ in CHOSEN}
    if left and not (options.model or options.only):
        print(f"FAILED: no model launches {', '.join(sorted(left))}")
        failed += len(left)
    print(f"Triton {triton.__version__}: {len(CHOSEN)} kernels, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
