"""A model that is loaded in this process: what `Scorer` and `AsyncScorer` have in common."""

import sys
from dataclasses import fields
from types import TracebackType
from typing import Self

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits
from gpuscore.config.options import checked
from gpuscore.engine.engine import Engine
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory
from gpuscore.prompts.decisions import ORDERS, read_asking
from gpuscore.prompts.model import ModelFiles

_UNLIMITED = RequestLimits(
    max_items=sys.maxsize,
    max_labels=sys.maxsize,
    max_label_tokens=sys.maxsize,
    max_request_tokens=sys.maxsize,
    max_questions=sys.maxsize,
    max_options=sys.maxsize,
    max_levels=sys.maxsize,
)
# Callers in this process wait for their own calls; none is refused.
_NO_QUEUE_LIMIT = EngineConfig(
    max_queued_requests=sys.maxsize, max_queued_tokens=sys.maxsize, max_queued_items=sys.maxsize
)


class LoadedScorer:
    """A model with its engine and its prompts. All methods may be called from several threads.

    Settings come from the arguments only; GPUSCORE_* variables and configuration files are read by
    the `gpuscore` command, not here.

    Args:
        model: "demo", a model directory, a hub name, or a whole `ModelConfig`, beside which no
            other setting may be given.
        family: the prompt family of `rerank`, `score_pairs` and guards, as `gpuscore serve
            --family`.
        decision_order: "fixed" or "balanced", for choices of `decide` and `system_one`.
        calibration: file of `gpuscore calibrate`, for the same.
        revision: branch, tag or commit of a hub model.
        backend: "torch" or "jax".
        device: "auto", "cpu", "cuda" or "tpu".
        dtype: "auto", "bfloat16", "float16" or "float32".
        quantization: "auto", "int8", "fp8" or "w8a16".
        attention: as `gpuscore serve --attention`.
        compile: "auto", "on" or "off"; functions in C on a CPU.
        compile_cache: directory where backend="jax" keeps compiled programs.
        kernels: "auto", "triton" or "torch".
        max_batch_tokens: most tokens of one forward pass.
        cuda_graph_tokens: tokens of the largest batch that runs as a CUDA graph.
        max_model_len: longest prompt, in tokens.
        memory_fraction: share of the free memory to use for keys and values of queries.
        kv_cache_size: bytes for them instead.
        memory_limit: most bytes for weights, the largest batch, and keys and values together.
        deterministic: compute every score to the same bits, whatever else is batched.
        allow_degenerate: load a quantised model although it has collapsed.
        tensor_parallel: devices that share the model, or on a CPU processes.
        threads: CPU threads.

    Raises:
        ConfigError: a setting has the wrong type or is out of range, or the model is not supported
            or, quantised, has collapsed.
    """

    def __init__(
        self,
        model: str | ModelConfig = "demo",
        *,
        family: str = "auto",
        decision_order: str = "fixed",
        calibration: str | None = None,
        revision: str | None = None,
        backend: str = "torch",
        device: str = "auto",
        dtype: str = "auto",
        quantization: str = "auto",
        attention: str = "auto",
        compile: str = "auto",
        compile_cache: str | None = None,
        kernels: str = "auto",
        max_batch_tokens: int | None = None,
        cuda_graph_tokens: int | None = None,
        max_model_len: int | None = None,
        memory_fraction: float | None = None,
        kv_cache_size: int | None = None,
        memory_limit: int | None = None,
        deterministic: bool = False,
        allow_degenerate: bool = False,
        tensor_parallel: int = 1,
        threads: int | None = None,
    ) -> None:
        given = locals()
        names = [item.name for item in fields(ModelConfig) if item.name != "model"]
        settings = {name: given[name] for name in names}
        if isinstance(model, ModelConfig):
            changed = [n for n in names if settings[n] != getattr(ModelConfig(), n)]
            if changed:
                raise ConfigError(f"{changed[0]} is given beside a ModelConfig; set it there")
            config = checked(model)
        else:
            config = checked(ModelConfig(model, **settings))
        if decision_order not in ORDERS:
            raise ConfigError(f"decision_order must be one of {', '.join(ORDERS)}")
        directory = model_directory(config.model, config.revision)
        asked = read_asking(decision_order, calibration)
        files = ModelFiles.read(directory, family, [config.model], asked)
        self._backend = create_backend(plan_backend(directory, config))
        try:
            self._prompts = files.prompts(self._backend.limits, _UNLIMITED)
            self._engine = Engine(
                self._backend, _NO_QUEUE_LIMIT, allow_degenerate=config.allow_degenerate
            )
        except BaseException:
            self._backend.close()  # else its threads would stay
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def warmup(self) -> None:
        """Do the lazy set-up that would delay the first score; on CUDA also capture the graphs of
        small batches, which takes some seconds. Call it before the first score.
        """
        self._backend.warmup()

    def close(self) -> None:
        """Free the model and end the threads."""
        self._engine.close()
