"""vLLM's CPU build for `cpu.py`, in a process of vLLM's own environment.

vLLM runs as its guide says: blocks of 32, a thread on each core, libiomp5 and tcmalloc preloaded if
they are below the environment or /usr/lib. It has no packed scoring: each query + item is a prompt
of one token, with its prefix cache; the query goes first, or all prompts at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BLOCK = 32
MODES = ("query first", "all at once")


def serve(model: str, dtype: str, longest: str, labels: str) -> None:
    """Answer lines of (mode, query, items) with log-probabilities of the labels for each item."""
    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to both
    wanted = json.loads(labels)
    sizes = {"block_size": BLOCK, "max_model_len": int(longest)}
    llm = LLM(model, dtype=dtype, skip_tokenizer_init=True, max_logprobs=-1, **sizes)
    one = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    params = SamplingParams(logprob_token_ids=wanted, **one)

    def generate(prompts: list[list[int]]) -> list[list[float]]:
        some: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        rows = [out.outputs[0].logprobs[0] for out in llm.generate(some, params, use_tqdm=False)]
        return [[row[label].logprob for label in wanted] for row in rows]

    for line in sys.stdin:
        mode, query, items = json.loads(line)
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM has not dropped its prefix cache")
        if mode == MODES[0]:
            generate([query])
        found = generate([query + item for item in items])
        print(json.dumps(found), file=answers, flush=True)


def started(python: Path, *words: str) -> "subprocess.Popen[str]":
    """Start `serve` with these words; as a context, it ends afterwards."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    folders = python.absolute().parents[1] / "lib", Path("/usr/lib")
    names = "libiomp5.so", "libtcmalloc_minimal.so.4"
    found = [next((p for f in folders for p in f.rglob(name)), None) for name in names]
    print(f"vLLM: cores {cores}; preloaded: {', '.join(map(str, found))}", flush=True)
    chosen = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
    chosen |= {"LD_PRELOAD": ":".join(str(path) for path in found if path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [str(python), "-P", __file__, *words]
    return subprocess.Popen(command, env=os.environ | chosen, **pipes)


if __name__ == "__main__":
    serve(*sys.argv[1:])
