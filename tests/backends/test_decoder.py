"""Promise: no score depends on how the decoder divides its work."""

from dataclasses import replace

import numpy as np

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import ModelConfig
from gpuscore.types.batch import Prefix, pack
from support.batches import NO_PAGES, item_segments
from support.models import random_ids


def test_rows_of_the_mlp_at_a_time(tiny_model):
    directory, _ = tiny_model("gemma2")  # with a norm behind the MLP
    plan = plan_backend(
        directory, ModelConfig(str(directory), dtype="float32", max_batch_tokens=64)
    )
    rng = np.random.default_rng(0)
    items = [random_ids(rng, n) for n in (1, 7, 20, 3)]
    batch = pack(item_segments(items, 0, 0, -1, [3, 17]), [Prefix(0, NO_PAGES)])
    scores = []
    for rows in (None, 1, 7, 30, 31):
        backend = create_backend(replace(plan, mlp_rows=rows))
        scores.append(backend.collect(backend.extend(batch)).label_logits)
        backend.close()
    for chunked in scores[1:]:
        np.testing.assert_allclose(chunked, scores[0], atol=1e-5)
