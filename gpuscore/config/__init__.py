"""The settings: frozen dataclasses with one field per setting.

Each setting's default, help, type and range are written only here; `options` reads them. Users
cannot set a field without an option; only code can.
"""

from dataclasses import dataclass

from gpuscore.config.options import PREFIX, common, count, duration, option, size_in_bytes, tokens

# Not a field: a key comes from the environment or a key file only.
API_KEY_VARIABLE = f"{PREFIX}API_KEY"
DRAIN_SPARE = 5.0  # seconds by which a drain may outlast the request timeout
# The names in gpuscore.prompts.registry, which this module may not import.
FAMILIES = (
    *("qwen3-reranker", "mxbai-rerank-v2", "bge-reranker-v2-gemma", "zerank", "instruct"),
    *("qwen3guard-gen", "llama-guard-3", "granite-guardian", "reward", "demo", "prm"),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Model and device."""

    model: str = common(
        "demo",
        "model directory, hub name such as Qwen/Qwen3-0.6B, or 'demo' (included in gpuscore); "
        "NAME=MODEL gives it another name in requests; serve takes several, separated by commas",
        metavar="MODEL",
        repeated="--model",
    )
    revision: str | None = common(None, "branch, tag or commit of a hub model", unset="main")
    adapter: str | None = option(
        None, "directory of a LoRA adapter (peft) that is merged into the model", metavar="DIR"
    )
    backend: str = option(
        "torch", "framework; jax: Llama, Mistral, Qwen2 and Qwen3 only", choices=("torch", "jax")
    )
    device: str = common(
        "auto",
        "device that runs the model; auto: CUDA, or the CPU on a machine without an NVIDIA device "
        "(one that cannot be used is an error); tpu with --backend jax only",
        choices=("auto", "cpu", "cuda", "tpu"),
    )
    dtype: str = common(
        "auto",
        "number format; auto: the checkpoint's own, or float32 on a CPU that has no instructions "
        "for it (with --backend jax, on any)",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantization: str = option(
        "auto",
        "linear layers of a quantised checkpoint; w8a16: weights are converted to --dtype at load; "
        "auto: integers as they are, which CUDA refuses, and others as w8a16",
        choices=("auto", "w8a16"),
    )
    attention: str = option(
        "auto",
        "attention kernels; flashinfer: an optional package; fa4: FlashAttention 4 for H100 and "
        "H200, from the extra hopper; torch, xla: plain operators; pallas: a kernel for TPUs, not "
        "run on hardware yet; auto: torch on CPU, triton on CUDA, with --backend jax pallas on TPU "
        "and xla elsewhere",
        choices=("auto", "triton", "flashinfer", "fa4", "torch", "xla", "pallas"),
        metavar="NAME",
    )
    compile: str = option(
        "auto",
        "C functions, on a CPU with a C compiler; auto: for a million parameters or more",
        choices=("auto", "on", "off"),
    )
    kernels: str = option(
        "auto",
        "norms, rotary embedding, gated MLP and label head; triton: kernels of our own; torch: "
        "plain operators; auto: torch on CPU, triton on CUDA",
        choices=("auto", "triton", "torch"),
    )
    max_batch_tokens: int | None = tokens(
        None,
        "most tokens of one forward pass",
        unset="2048 on CPU, 16384 on CUDA and TPU",
        common=True,
    )
    cuda_graph_tokens: int | None = tokens(
        None,
        "tokens of the largest batch that runs as a CUDA graph; 0: none",
        unset="4096 on CUDA",
        minimum=0,
    )
    max_model_len: int | None = tokens(
        None, "longest prompt", unset="the model's max_position_embeddings", common=True
    )
    memory_fraction: float | None = common(
        None,
        "share, for keys and values, of the memory that weights and the largest batch leave",
        unset="0.9; on CPU 0.7, and at most four prompts of full length or 65536 tokens",
        minimum=0.05,
        maximum=1.0,
        metavar="SHARE",
    )
    kv_cache_size: int | None = size_in_bytes(
        None,
        "memory for keys and values, such as 512MiB or 4GiB",
        unset="the share of --memory-fraction",
        common=True,
    )
    deterministic: bool = option(
        False, "compute every score to the same bits, whatever else is batched or cached; slower"
    )
    allow_degenerate: bool = option(
        False,
        "serve a quantised model whose answers to known prompts are all the same or not finite",
    )
    tensor_parallel: int = common(
        1,
        "devices (on a CPU: processes) that share one model, each with a part of every layer",
        minimum=1,
        maximum=64,
        metavar="RANKS",
    )
    threads: int | None = common(
        None, "CPU threads for the model", unset="torch's own choice", minimum=1, maximum=1024
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """HTTP server."""

    host: str = common(
        "127.0.0.1", "address to bind; only loopback needs no API key", metavar="ADDRESS"
    )
    port: int = common(8000, "port to bind; 0: any free one", minimum=0, maximum=65535)
    served_model_name: str | None = common(None, "the model's name in requests", unset="MODEL's")
    family: str = common(
        "auto",
        "prompt family that /rerank and /v1/classify use; auto: chosen by the model's files or "
        f"name; none: these routes refuse requests; or {', '.join(FAMILIES)}",
        choices=("auto", "none", *FAMILIES),
        metavar="NAME",
    )
    api_key_file: str | None = common(
        None,
        f"file with one API key per line, # for comments; {API_KEY_VARIABLE} holds one key",
        metavar="FILE",
    )
    insecure: bool = option(False, "allow a non-loopback address without an API key")
    allowed_hosts: str | None = option(
        None,
        "host names by which this server may be called, besides loopback names, separated by "
        "commas; *: any",
        unset="any; without keys on a loopback address, loopback names only",
    )
    path_aliases: str | None = option(
        None,
        "further path of a route, such as /ping=/ready; may be repeated",
        unset="none",
        metavar="PATH=ROUTE",
        repeated="--path-alias",
    )
    ui: bool = option(True, "serve pages for people: a playground at / and /status")
    max_body_bytes: int = size_in_bytes(
        16 * 2**20, "largest request body, unpacked; a larger one gets 413"
    )
    max_header_bytes: int = size_in_bytes(
        16 * 2**10,
        "largest request head, with chunk extensions and trailer fields; a larger one gets 431",
        minimum=256,
    )
    max_connections: int = 4096  # most open connections; more are closed
    max_inflight_per_key: int = count(1024, "most requests in flight of one API key; more get 429")
    max_answer_bytes: int = size_in_bytes(
        256 * 2**20, "most bytes that an answer may come to; a request for more gets 400"
    )
    max_queued_bytes: int = size_in_bytes(
        256 * 2**20,
        "most bytes of bodies in flight, and that their answers may come to; more get 429 (one "
        "request is always admitted)",
    )
    # Proxies and load balancers give up after 60 seconds by default: half of that is for the work
    # of other requests, half for the request's own.
    max_queue_seconds: float = duration(
        30.0, "longest expected wait for other requests' work; longer: 429"
    )
    client_timeout: float = duration(
        30.0,
        "time for a client to send a whole request head, to send a whole body, and to take each "
        "64 KiB of its answer",
    )
    # Proxies keep connections for 60 seconds or less by default. If one kept them for longer than
    # the server, a request that it sends just as the server closes would be lost.
    keep_alive_timeout: float = duration(
        75.0, "time that a connection may be idle; longer than that of a proxy in front"
    )
    request_timeout: float = duration(120.0, "time for an answer; then 504", common=True)
    drain_timeout: float | None = None  # None: the request timeout and DRAIN_SPARE
    log_requests: bool = common(
        True, "write a line per request to standard error, without input text; probes have none"
    )

    @property
    def drain_seconds(self) -> float:
        """The time for requests in flight to end after SIGTERM: enough for each to be answered."""
        timeout = self.drain_timeout
        return self.request_timeout + DRAIN_SPARE if timeout is None else timeout


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    max_items: int = count(10000, "most items of one request", common=True)
    max_labels: int = count(128, "most labels of one item")
    max_label_tokens: int = 32  # most tokens of one label
    max_request_tokens: int = tokens(1048576, "most tokens of a request; shared ones count once")
    rerank_truncate: bool = option(
        False, "cut documents that do not fit the model, in requests to /rerank without truncate"
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Replicas, queue, prefix cache and engine timeouts."""

    devices: str | None = common(
        None,
        "devices with a replica of the model each, such as cuda:0,cuda:1; all: every CUDA device",
        unset="the one of --device",
        metavar="DEVICES",
    )
    max_queued_requests: int = count(1024, "most requests in flight; more get 429")
    # Most tokens and items in flight; more get 429, but one request is always admitted.
    max_queued_tokens: int = 4 * 1048576
    max_queued_items: int = 200000
    prefix_cache: bool = option(True, "keep the keys and values of queries for later requests")
    # Seconds without progress in a batch; then the engine's process is killed and started again.
    engine_timeout: float = 60.0
    # Weights that fill a GPU of 141 GB take 24 minutes from a disk of 100 MB/s. Without a limit,
    # /health would report a load that hangs as alive.
    load_timeout: float = duration(
        1800.0, "time to load and warm the model, without downloads; then the engine is killed"
    )


@dataclass(frozen=True, slots=True)
class FileConfig:
    """Configuration file."""

    config: str | None = common(None, "TOML file with one line per option", metavar="FILE")


CONFIGS: tuple[type, ...] = (ModelConfig, ServerConfig, RequestLimits, EngineConfig)
