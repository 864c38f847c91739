"""Scores of vLLM's CPU build for bench/rounding.py, which runs this in vLLM's own environment.

    VLLM_PYTHON bench/rounding_vllm.py MODEL FILE

FILE holds prompts and labels as JSON; it is overwritten with log-probabilities and CPU-seconds.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    model, file = sys.argv[1], Path(sys.argv[2])
    asked = json.loads(file.read_text())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype=asked["dtype"],
        block_size=32,
        max_model_len=asked["longest"] + 32,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_logprobs=-1,
    )
    labels = asked["labels"]
    params = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, logprob_token_ids=labels
    )

    def generate(prompts):
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.generate(inputs, params, use_tqdm=False)

    generate([asked["query"]])  # items then find it in the cache
    outputs = generate([asked["query"] + item for item in asked["items"]])
    rows = [out.outputs[0].logprobs[0] for out in outputs]
    file.write_text(json.dumps([[row[label].logprob for label in labels] for row in rows]))


if __name__ == "__main__":
    main()
