"""Model shapes and workloads that the benches share. Tokens are random and different in every run,
so that no cache and no repetition can help."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# The same products, in seconds instead of minutes.
FOUR_LAYERS = QWEN3_06B | {"vocab_size": 32768, "num_hidden_layers": 4}
SMALL = QWEN3_06B | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Layers of Qwen3-30B-A3B, with a quarter of the experts and half of each row's choices.
MIXTURE = QWEN3_06B | {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SMALL_MIXTURE = SMALL | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
TINY = SMALL | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
SHAPES = {
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-0.6b-4-layers": FOUR_LAYERS,
    "qwen3-moe-4-layers": MIXTURE,
    "small": SMALL,
    "small-moe": SMALL_MIXTURE,
    "tiny": TINY,
}


Request: TypeAlias = tuple[list[int], list[list[int]]]  # query, items; token ids


@dataclass(frozen=True)
class Workload:
    """Requests, one after the other, each of a shared query and items, lengths in tokens."""

    query_len: int
    num_items: int
    item_len: int
    seed: int = 0
    cached: int = 0  # number of first query tokens that are cached
    requests: int = 1

    def __str__(self) -> str:
        rest = self.query_len - self.cached
        query = f"{self.cached:,} cached + {rest:,}" if self.cached else f"{rest:,}"
        query = query.removesuffix(" + 0")
        one = f"{query} + {self.num_items:,} x {self.item_len}"
        return one if self.requests == 1 else f"{self.requests} requests of {one}"

    @property
    def tokens(self) -> int:
        """Number of tokens of one request to compute."""
        return self.query_len - self.cached + self.num_items * self.item_len

    def draw(self, vocab: int) -> Request:
        """Draw the first request."""
        return self._one(self._rng(), vocab)

    def draw_all(self, vocab: int) -> list[Request]:
        rng = self._rng()
        return [self._one(rng, vocab) for _ in range(self.requests)]

    def _rng(self) -> np.random.Generator:
        # Queries of two workloads begin differently, or the second one's would be cached.
        return np.random.default_rng([self.seed, self.query_len, self.num_items, self.item_len])

    def _one(self, rng: np.random.Generator, vocab: int) -> Request:
        query = rng.integers(0, vocab, self.query_len).tolist()
        return query, rng.integers(0, vocab, (self.num_items, self.item_len)).tolist()


WORKLOADS = {
    "reports": Workload(2000, 500, 20),
    "hundred": Workload(500, 100, 20),
    "separate": Workload(120, 10, 180, requests=10),  # little is shared
    "single": Workload(280, 1, 20),  # nothing is shared
    "short": Workload(300, 16, 32),
    "growth": Workload(2000, 10000, 20),
}


def make_model(shape: str, dtype: str, scratch: Path) -> Path:
    """Return a Hugging Face directory with random weights of a shape, made once.

    Norm weights differ from 1, and logits have a standard deviation over 1.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    directory = scratch / f"{shape}-{dtype}"
    if (directory / "model.safetensors").is_file():
        return directory
    torch.manual_seed(0)
    config = (Qwen3MoeConfig if "num_experts" in SHAPES[shape] else Qwen3Config)(**SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            else:
                spread = 1.4 * parameter.shape[-1] ** -0.5
                parameter.copy_(spread * torch.randn(parameter.shape))
    model.tie_weights()
    model.save_pretrained(directory)
    return directory
