"""Backends of real configurations on the device that is not there; weights have no contents."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gpuscore.backends import plan_backend
from gpuscore.backends.common.architectures import Architecture
from gpuscore.backends.common.shapes import weight_shapes
from gpuscore.backends.torch import backend as backend_module
from gpuscore.backends.torch import loader
from gpuscore.backends.torch.attention import choice, fa4
from gpuscore.backends.torch.backend import TorchBackend
from gpuscore.config import ModelConfig
from graphs.recorder import Recorder


def empty_files(
    directory: Path,
    architecture: Architecture,
    framework: str,
    shard: object = None,
    device: str = "cuda",
) -> AbstractContextManager[Any]:
    """Stand for `CheckpointFiles`: tensors have shapes and no contents; none is quantised."""
    shapes = weight_shapes(architecture.config)
    files = SimpleNamespace(
        shapes=shapes,
        reopen=lambda: None,
        scale=lambda part, name: None,
        tensor=lambda part, name: torch.empty(shapes[part], dtype=torch.bfloat16, device=device),
        refuse_left_over=lambda tied: None,
    )
    return nullcontext(files)


@dataclass
class Started:
    """A backend on the device.

    Attributes:
        most: bytes that it counted for itself when it started.
    """

    backend: TorchBackend
    most: int


@contextmanager
def started(
    config: Mapping[str, Any], settings: Mapping[str, Any], recorder: Recorder
) -> Iterator[Started]:
    """Start a backend; its thread records, too."""
    measured: list[Any] = []

    def noting(*arguments: Any, **options: Any) -> Any:
        measured.append(measure(*arguments, **options))
        return measured[-1]

    measure = backend_module.measure
    enter: Callable[[], Any] = recorder.__enter__
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for module, name, stand_in in (
            (loader, "CheckpointFiles", empty_files),
            (backend_module, "ThreadPoolExecutor", partial(ThreadPoolExecutor, initializer=enter)),
            (backend_module, "measure", noting),
            # It compares results, of which there are none.
            (backend_module, "check_start", lambda *arguments: None),
            # FlashAttention 4's kernel is no code of Triton's: an operator counts for it.
            (fa4, "load", lambda *sizes: lambda q, k, v, out, *others: out.zero_()),
            (choice, "REASONS", choice.REASONS | {"fa4": choice.REASONS["triton"]}),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        (folder / "config.json").write_text(json.dumps(config))
        plan = plan_backend(folder, ModelConfig(str(folder), device="cuda", **settings))
        backend = TorchBackend(plan)
        stack.callback(backend.close)
        pages = backend.limits.num_pages * plan.pages.page_bytes + plan.pages.state_bytes
        before = recorder.total - measured[0].free
        yield Started(backend, before + measured[0].batch + pages)
