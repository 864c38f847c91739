"""The peak growth of memory while every position of a long prompt is scored, in bytes.

python -P -m support.position_memory DIRECTORY TOKENS VOCABULARY
"""

import json
import sys
from pathlib import Path

import numpy as np

from gpuscore.backends import create_backend, plan_backend
from gpuscore.backends.common.memory import HostMemory
from gpuscore.config import ModelConfig
from gpuscore.engine.engine import Engine
from gpuscore.types.batch import NO_TOKENS
from gpuscore.types.request import ScoreRequest
from support.batches import every_token


def main(directory: str, tokens: int, vocab: int) -> None:
    config = ModelConfig(
        directory, dtype="float32", threads=1, max_batch_tokens=tokens, kv_cache_size=2**24
    )
    engine = Engine(create_backend(plan_backend(Path(directory), config)))
    rng = np.random.default_rng(0)

    def ask(count: int) -> None:
        prompt = rng.integers(0, vocab, count).astype(np.int32)
        labels = (np.roll(prompt, -1),)
        rows = every_token((prompt,))
        request = ScoreRequest(NO_TOKENS, (prompt,), labels, True, 20, readouts=rows)
        lse = engine.score(request).result(120).lse
        assert lse is not None
        assert len(lse) == count

    ask(16)
    print(json.dumps(HostMemory().growth(lambda: ask(tokens))))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
