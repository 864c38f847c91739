"""The real model in transformers, in float32: whole prompts, without cache, packing or padding."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpuscore.measure.workload import SENTENCES, read_texts

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("REAL_MODEL", ROOT / ".cache" / "smollm2"))
CLOSE = 1e-4  # log-probability
TEXTS = read_texts(SENTENCES, "sentences")
PASSAGES = [sentence for text in TEXTS for sentence in text.items]


class Reference:
    """Log-probabilities of texts and ids, made with none of gpuscore's code."""

    def __init__(self, directory: Path = MODEL) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text)["input_ids"]]

    def chat(self, *messages: tuple[str, str]) -> list[int]:
        """Return a conversation's ids up to the beginning of the answer."""
        talk = [{"role": role, "content": content} for role, content in messages]
        return self.ids(
            self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        )

    def rows(self, ids: list[int], last: int = 0) -> NDArray[np.float64]:
        """Return log-probabilities [T, V] after each token, or after the last ones only."""
        with torch.inference_mode():
            out = self.model(torch.tensor([ids]), use_cache=False, logits_to_keep=last)
        return torch.log_softmax(out.logits[0].double(), dim=-1).numpy()

    def labels(self, prompt: list[int], labels: list[str]) -> NDArray[np.float64]:
        """Return the log-probability of each label, of any number of tokens, after a prompt."""
        alone = [self.ids(label) for label in labels]
        first = self.rows(prompt, 1)[0] if any(len(ids) == 1 for ids in alone) else None
        sums = []
        for label in alone:
            if first is not None and len(label) == 1:
                sums.append(first[label[0]])
                continue
            rows = self.rows([*prompt, *label[:-1]], len(label))
            sums.append(sum(row[token] for row, token in zip(rows, label, strict=True)))
        return np.array(sums)
