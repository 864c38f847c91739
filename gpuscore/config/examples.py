"""Examples in the --help of each command; `tests/test_help.py` parses all of them."""

EXAMPLES = {
    "gpuscore": """\
Examples:

  gpuscore serve demo
  gpuscore doctor
  gpuscore serve --help
""",
    "serve": """\
Examples:

  gpuscore serve Qwen/Qwen3-Reranker-0.6B
  gpuscore serve ./my-model --port 9000 --dtype bfloat16 --max-model-len 8192
  gpuscore serve --config gpuscore.toml --host 0.0.0.0 --api-key-file keys.txt
  gpuscore serve Qwen/Qwen3-0.6B --devices cuda:0,cuda:1

""",
    "info": """\
Examples:

  gpuscore info Qwen/Qwen3-8B
  gpuscore info Qwen/Qwen3-8B --device-memory 24GiB --max-model-len 16384

""",
    "doctor": """\
Examples:

  gpuscore doctor
  gpuscore doctor --port 9000 --device cpu --json

Exit code 1: something would keep a server from starting.

""",
    "parity run": """\
Examples:

  gpuscore parity run Qwen/Qwen3-0.6B --backends torch:bfloat16,torch:float32
  gpuscore parity run demo --backends torch:float32 --workload quick \\
    --report parity.html

""",
    "parity record": """\
Examples:

  gpuscore parity record Qwen/Qwen3-0.6B -o this-machine --dtype bfloat16
  gpuscore parity record Qwen/Qwen3-0.6B --oracle -o exact --dtype float32

""",
    "parity compare": """\
Examples:

  gpuscore parity compare this-machine other-machine
  gpuscore parity compare gpu tpu --reference exact rounded
""",
    "bench": """\
Examples:

  gpuscore bench --url http://127.0.0.1:8000
  gpuscore bench --model demo --scenario rerank,latency --scale 0.1 --minutes 1
  gpuscore bench --model demo --serve '--backend torch' --serve '--backend jax'
  gpuscore bench --url http://127.0.0.1:8000 --scenario poisson --find-rate 500

Exit code 1: a way has no figures; the table says why.
""",
    "bench compare": """\
Examples:

  gpuscore bench compare h200.json v6e.json --price h200=3.50/h --price v6e=2.70/h
  gpuscore bench compare h200.json cpu.json --report page.html
""",
}
