"""CTranslate2 as a peer of bench/cpu.py; runs in an environment of its own, which also needs torch
and transformers, for the conversion of the model.

One unrestricted token is generated for each prompt, and the labels' log-probabilities follow from
its logits.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
from peer_side import answer_jobs

# The query's keys and values computed once for all items of a request; or whole prompts in batches.
QUERY_REUSED, WHOLE = "query as static prompt", "whole prompts"
BATCH = 32  # prompts of a batch


def convert(directory, target, compute):
    """Write the model in CTranslate2's format; token ids are its tokens' names."""
    from ctranslate2.converters.transformers import Qwen3Loader
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(directory, dtype="float32")
    names = {str(token): token for token in range(model.config.vocab_size)}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "0")
    spec = Qwen3Loader()(model, SimpleNamespace(get_vocab=lambda: names, **special))
    spec.validate()
    spec.optimize(quantization=compute)
    spec.save(target)


def load(settings):
    import ctranslate2
    import numpy as np

    labels, compute = settings["labels"], settings["dtype"]
    with tempfile.TemporaryDirectory() as folder:
        convert(settings["model"], folder, compute)
        model = ctranslate2.Generator(
            folder, device="cpu", compute_type=compute, intra_threads=settings["threads"]
        )

    def score(requests, way):
        return [score_one(query, items, way) for query, items in requests]

    def score_one(query, items, way):
        reused = way == QUERY_REUSED
        prompts = items if reused else [query + item for item in items]
        results = model.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            static_prompt=[str(token) for token in query] if reused else None,
            max_batch_size=BATCH,
            max_length=1,
            include_prompt_in_result=False,
            return_logits_vocab=True,
        )
        return [log_probabilities(result.logits[0]) for result in results]

    def log_probabilities(view):
        logits = np.asarray(view, dtype=np.float64).reshape(-1)
        best = logits.max()
        return (logits[labels] - best - np.log(np.exp(logits - best).sum())).tolist()

    return score, lambda: None


if __name__ == "__main__":
    answer_jobs(load)
