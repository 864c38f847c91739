"""Examples in the --help of each command; `tests/test_help.py` parses all of them."""

_LINES = {
    "gpuscore": ("serve demo", "doctor", "serve --help"),
    "serve": (
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
    "doctor": ("doctor --port 9000 --device cpu",),
    "parity run": ("parity run demo --dtype float32 --report parity.html",),
    "parity record": ("parity record Qwen/Qwen3-0.6B --oracle -o exact.json --dtype float32",),
    "parity compare": ("parity compare gpu.json tpu.json --reference exact.json rounded.json",),
    "bench": ("bench --model demo --scenario rerank,latency --scale 0.1 --minutes 1",),
    "bench compare": ("bench compare h200.json v6e.json --price h200=3.50/h",),
}
EXAMPLES = {
    name: "\n  gpuscore ".join(("Examples:\n", *lines)) + "\n\n" for name, lines in _LINES.items()
}
