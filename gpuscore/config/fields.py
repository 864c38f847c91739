"""Configuration: frozen dataclasses whose fields carry all that is known about a value.

A default, its help, its type and its range are written here and nowhere else; `options` reads them
for the command line (`flags`), the environment and the file (`sources`).
"""

from dataclasses import dataclass, field
from typing import Any

PREFIX = "GPUSCORE_"  # of every environment variable
API_KEY = "api_key"  # the one value that is no field: it comes from the environment or a key file
API_KEY_VARIABLE = "GPUSCORE_API_KEY"
DRAIN_SPARE = 5.0  # seconds between the last answer that is due and the end of a drain


# Of gpuscore.prompts.registry, which is not imported for it.
FAMILIES = (
    *("qwen3-reranker", "mxbai-rerank-v2", "bge-reranker-v2-gemma", "zerank", "instruct"),
    *("qwen3guard-gen", "llama-guard-3", "reward", "demo"),
)


def option(
    default: Any,
    help: str,
    *,
    unset: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str = "",
    positional: bool = False,
    size: bool = False,
    added: tuple[str, float] | None = None,
) -> Any:
    """A configuration field: its default (`unset` says what None means), help and range.

    A `size` is a number of bytes, which text may give in KiB, MiB, GiB or TiB. `added`: the field
    whose value and the number whose sum None stands for.
    """
    metadata = {
        "help": help,
        "unset": unset,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "metavar": metavar or ("" if choices else "N"),
        "positional": positional,
        "size": size,
        "added": added,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to serve and on what."""

    model: str = option(
        "demo",
        "model directory, hub name such as Qwen/Qwen3-0.6B, or 'demo' (comes with gpuscore)",
        metavar="MODEL",
        positional=True,
    )
    revision: str | None = option(
        None, "branch, tag or commit of a hub model", unset="main", metavar="NAME"
    )
    backend: str = option(
        "torch",
        "framework that computes; jax: Llama, Mistral, Qwen2 and Qwen3 only, needs gpuscore[jax]",
        choices=("torch", "jax"),
    )
    device: str = option(
        "auto",
        "where to compute; tpu with --backend jax only",
        choices=("auto", "cpu", "cuda", "tpu"),
    )
    dtype: str = option(
        "auto",
        "number format of weights and activations; auto: the checkpoint's own, or float32 on a CPU "
        "without instructions for it (with --backend jax on any CPU)",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    attention: str = option(
        "auto",
        "attention kernels; triton: one launch for pages and packed rows; two-pass: a library's "
        "kernel over shared keys, then ours; flashinfer, flashinfer-cascade: of an optional "
        "package; torch: plain operators; auto: torch on CPU and with --deterministic, triton on "
        "CUDA, XLA's with --backend jax; pallas: a TPU kernel of that backend, not run on hardware "
        "yet",
        choices=(
            "auto",
            "triton",
            "two-pass",
            "flashinfer",
            "flashinfer-cascade",
            "torch",
            "pallas",
        ),
    )
    compile: str = option(
        "auto",
        "fuse element-wise work with torch.compile, on a CPU with a C++ compiler; auto: models of "
        "100 million parameters or more; --backend jax always compiles",
        choices=("auto", "on", "off"),
    )
    compile_cache: str | None = option(
        None,
        "directory where --backend jax keeps compiled programs for the next start",
        unset="they are compiled anew",
        metavar="DIRECTORY",
    )
    kernels: str = option(
        "auto",
        "what computes norms, rotary embedding, gated MLP and label head; triton: kernels of our "
        "own; torch: plain operators; auto: torch on CPU, triton on CUDA",
        choices=("auto", "triton", "torch"),
    )
    max_batch_tokens: int | None = option(
        None,
        "tokens of one forward pass",
        unset="2048 on CPU, 16384 on CUDA and TPU",
        minimum=1,
        metavar="TOKENS",
    )
    cuda_graph_tokens: int | None = option(
        None,
        "tokens of the largest batch that runs as a CUDA graph; needs attention and kernels of "
        "triton; 0: none",
        unset="4096 on CUDA",
        minimum=0,
        metavar="TOKENS",
    )
    max_model_len: int | None = option(
        None,
        "longest prompt",
        unset="the model's max_position_embeddings",
        minimum=1,
        metavar="TOKENS",
    )
    memory_fraction: float | None = option(
        None,
        "share of the memory that weights and the largest batch leave, as measured at start, for "
        "the keys and values of queries",
        unset="0.9, or 0.7 on CPU and there at most four prompts of full length or 65536 tokens",
        minimum=0.05,
        maximum=1.0,
        metavar="SHARE",
    )
    kv_cache_size: int | None = option(
        None,
        "memory for the keys and values of queries, such as 512MiB or 4GiB, instead of a share",
        unset="as --memory-fraction says",
        minimum=1,
        metavar="BYTES",
        size=True,
    )
    deterministic: bool = option(
        False,
        "same bits of every score, whatever else is in a batch or is cached; slower",
    )
    threads: int | None = option(
        None, "CPU threads of the model", unset="torch's own choice", minimum=1, maximum=1024
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option(
        "127.0.0.1", "address to bind; another than loopback needs an API key", metavar="ADDRESS"
    )
    port: int = option(8000, "port to bind; 0 takes a free one", minimum=0, maximum=65535)
    served_model_name: str | None = option(
        None,
        "name of the model in requests and answers",
        unset="the model as given",
        metavar="NAME",
    )
    family: str = option(
        "auto",
        "family of rerankers, guards or reward models whose prompt and formula /rerank and "
        "/v1/classify use; auto: what the model's directory or name says; none: they are refused; "
        f"or {', '.join(FAMILIES)}",
        choices=("auto", "none", *FAMILIES),
        metavar="NAME",
    )
    api_key_file: str | None = option(
        None,
        f"file with one API key per line; {API_KEY_VARIABLE} holds a single one",
        metavar="FILE",
    )
    insecure: bool = option(False, "allow a non-loopback address without an API key")
    cors_origin: str | None = option(
        None,
        "origin of web pages that may call this server from a browser, such as "
        "https://app.example.org; several with commas between them; *: any (CORS)",
        unset="none",
        metavar="ORIGIN",
    )
    max_body_bytes: int = option(
        16 * 2**20, "size of a request body before 413", minimum=1, metavar="BYTES"
    )
    max_header_bytes: int = option(
        16 * 2**10,
        "size of a request head, with chunk extensions and trailer fields, before 431",
        minimum=256,
        metavar="BYTES",
    )
    max_headers: int = option(100, "header fields of a request before 431", minimum=1)
    max_connections: int = option(4096, "open connections; more are closed at once", minimum=1)
    max_inflight_per_key: int = option(
        256, "requests in flight of one API key before 429", minimum=1
    )
    max_queued_bytes: int = option(
        256 * 2**20,
        "request bodies in memory before 429 (one request is always admitted)",
        minimum=1,
        metavar="BYTES",
    )
    # Proxies and load balancers give up after 60 seconds by default: half of that for the work of
    # others, half for the request's own.
    max_queue_seconds: float = option(
        30.0,
        "expected wait for the work of other requests before 429, from the measured token rate",
        minimum=0.1,
        maximum=86400,
        metavar="SECONDS",
    )
    header_timeout: float = option(
        10.0, "time for a complete request head", minimum=0.1, maximum=86400, metavar="SECONDS"
    )
    body_timeout: float = option(
        30.0, "time for a complete request body", minimum=0.1, maximum=86400, metavar="SECONDS"
    )
    send_timeout: float = option(
        30.0,
        "time in which a client must take some of its answer",
        minimum=0.1,
        maximum=86400,
        metavar="SECONDS",
    )
    request_timeout: float = option(
        120.0, "time for an answer before 504", minimum=0.1, maximum=86400, metavar="SECONDS"
    )
    drain_timeout: float | None = option(
        None,
        "time that SIGTERM leaves to what is in flight",
        unset=f"--request-timeout and {DRAIN_SPARE:g}",
        added=("request_timeout", DRAIN_SPARE),
        minimum=0.1,
        maximum=86400,
        metavar="SECONDS",
    )
    log_requests: bool = option(
        True, "write one JSON line per request to standard error, without any input text"
    )
    timing_headers: bool = option(
        False, "tell callers the milliseconds of each stage, which shows them cache hits"
    )
    otlp_endpoint: str | None = option(
        None,
        "OpenTelemetry collector to send traces to, such as http://collector:4318; needs "
        "gpuscore[otel]",
        unset="OTEL_* variables, or no traces",
        metavar="URL",
    )

    @property
    def drain_seconds(self) -> float:
        """The drain timeout; by default it cuts off nothing that may still be answered."""
        given = self.drain_timeout
        return self.request_timeout + DRAIN_SPARE if given is None else given


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The largest request that is accepted."""

    max_items: int = option(10000, "items of one request", minimum=1)
    max_labels: int = option(128, "labels of one item", minimum=1)
    max_request_tokens: int = option(
        1048576, "size of one request, the shared part counted once", minimum=1, metavar="TOKENS"
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The queue, the prefix cache, and when the engine counts as stuck."""

    max_queued_requests: int = option(1024, "requests in flight before 429", minimum=1)
    max_queued_tokens: int = option(
        4 * 1048576,
        "work in flight before 429 (one request is always admitted)",
        minimum=1,
        metavar="TOKENS",
    )
    max_queued_items: int = option(
        200000, "items in flight before 429 (one request is always admitted)", minimum=1
    )
    prefix_cache: bool = option(True, "keep the keys and values of queries for later requests")
    engine_timeout: float = option(
        60.0,
        "time for one forward pass; then the engine's process is ended and started again",
        minimum=0.1,
        maximum=86400,
        metavar="SECONDS",
    )
    # Weights that fill a GPU of 141 GB take 24 minutes from a disk of 100 MB/s. Without a limit, a
    # load that hangs looks alive to whoever asks /health.
    load_timeout: float = option(
        1800.0,
        "time for loading and warming the model, downloads not included; then the engine's process "
        "is ended",
        minimum=0.1,
        maximum=86400,
        metavar="SECONDS",
    )


@dataclass(frozen=True, slots=True)
class FileConfig:
    """Configuration file."""

    config: str | None = option(None, "TOML file with one line per option", metavar="FILE")


CONFIGS: tuple[type, ...] = (ModelConfig, ServerConfig, RequestLimits, EngineConfig)
