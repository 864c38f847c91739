"""Promise: the kernels compute labels of several tokens as torch's own operators do."""

import numpy as np
import pytest

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.types.request import LabelTrie, ScoreRequest
from support.slow import slow
from support.token_ids import random_ids

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
TRIE = LabelTrie(((12, 7, 5, 3), (12, 8), (9,), (12,), (3, 3)))


def ints(values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("family", ["qwen3", *slow("gemma2")])
def test_the_same_sums_as_torch(tiny_model, quick_start, family):
    directory, _ = tiny_model(family, **SMALL)
    rng = np.random.default_rng(0)
    items = tuple(ints(random_ids(rng, n)) for n in (1, 5, 18, 30))
    query = ints(random_ids(rng, 21))
    request = ScoreRequest(query, items, (TRIE.first_ids,) * 4, True, trie=TRIE)
    logits = []
    for attention in ("torch", "triton"):
        options = {"dtype": "float32", "max_batch_tokens": 48, "max_model_len": 64}
        config = ModelConfig(str(directory), attention=attention, **options)
        engine = Engine(create_backend(plan_backend(directory, config)))
        results = [engine.score(request).result(60) for _ in range(2)]  # cold, then cached
        assert results[0].computed_tokens > results[1].computed_tokens
        logits.append([result.label_logits for result in results])
        engine.close()
    assert np.std(logits[0]) > 1
    np.testing.assert_allclose(logits[1], logits[0], atol=5e-5, rtol=0)
