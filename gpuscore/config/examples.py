"""Examples in the --help of each command; `tests/test_help.py` parses all of them."""

_EXIT_CODES = {
    "batch": "The same command continues a job that was ended. Exit code 1: a label is not valid, "
    "or\nall rows or more than --max-bad of them are bad. Exit code 2: the input has no such\n"
    "column.",
    "doctor": "Exit code 1: something would keep a server from starting.",
    "bench": "Exit code 1: a way has no figures; the table says why.",
}
_LINES = {
    "gpuscore": ("serve demo", "doctor", "serve --help"),
    "serve": (
        "serve Qwen/Qwen3-Reranker-0.6B --port 9000 --max-model-len 8192",
        "serve --config gpuscore.toml --host 0.0.0.0 --api-key-file keys.txt",
        "serve Qwen/Qwen3-0.6B --devices cuda:0,cuda:1",
    ),
    "batch": (
        "batch Qwen/Qwen3-0.6B --input pairs.parquet --output scored.parquet \\\n"
        "    --query-column query --item-column item --labels yes,no",
        "batch Qwen/Qwen3-Reranker-0.6B --input pairs.jsonl --output scored.jsonl \\\n"
        "    --query-column query --item-column document",
        "batch Qwen/Qwen3-0.6B --input calls.jsonl --output answers.jsonl --requests",
    ),
    "info": ("info Qwen/Qwen3-8B --device-memory 24GiB --max-model-len 16384",),
    "doctor": ("doctor", "doctor --port 9000 --device cpu"),
    "parity run": ("parity run demo --backends torch:float32 --report parity.html",),
    "parity record": ("parity record Qwen/Qwen3-0.6B --oracle -o exact --dtype float32",),
    "parity compare": ("parity compare gpu tpu --reference exact rounded",),
    "bench": (
        "bench --url http://127.0.0.1:8000",
        "bench --model demo --scenario rerank,latency --scale 0.1 --minutes 1",
        "bench --model demo --serve '--backend torch' --serve '--backend jax'",
    ),
    "bench compare": ("bench compare h200.json v6e.json --price h200=3.50/h",),
}
EXAMPLES = {
    name: "\n\n".join(
        (
            "Examples:",
            "\n".join(f"  gpuscore {line}" for line in lines),
            *((_EXIT_CODES[name],) if name in _EXIT_CODES else ()),
            "",
        )
    )
    for name, lines in _LINES.items()
}
