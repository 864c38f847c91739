"""Evaluates the demo model on rankings and typed questions that training never sees."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from demo import synthetic
from demo.decision_texts import SINGLE as LABELS
from demo.decisions import draw_typed_group
from demo.packing import PAD_ID, collate, pack_typed

QUESTIONS = 4  # of each state


@dataclass(frozen=True)
class Typed:
    """Results on one kind of typed question: share of right answers, label mass, questions."""

    accuracy: float
    least_mass: float
    mean_mass: float
    count: int


@dataclass(frozen=True)
class Evaluation:
    """Held-out results: mean nDCG@10, the same in random order, and typed questions by topic."""

    ndcg: float
    chance: float
    typed: dict[str, Typed]

    def __str__(self) -> str:
        typed = ", ".join(
            f"{topic} {figures.accuracy:.3f} (mass {figures.mean_mass:.3f})"
            for topic, figures in self.typed.items()
        )
        return f"held-out nDCG@10 {self.ndcg:.4f}, random order {self.chance:.4f}; {typed}"

    def table(self) -> str:
        """Return the typed questions as rows of a Markdown table."""
        return "\n".join(
            f"| {topic} | {figures.count} | {figures.accuracy:.3f} | {figures.mean_mass:.3f} |"
            for topic, figures in self.typed.items()
        )


def labels_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of all labels."""
    return tuple(tokenizer.encode(label).ids[0] for label in LABELS)


@torch.no_grad()
def score_items(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, items: Sequence[str]
) -> tuple[list[float], float]:
    """Return p("yes") among yes and no per item, and the least mass that the two had.

    This runs plain padded rows without the training layout, as a user of the model would.
    """
    prefix = tokenizer.encode(prompt).ids
    rows = [prefix + encoded.ids for encoded in tokenizer.encode_batch(list(items))]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in rows])
    hidden = model.model(input_ids=ids).last_hidden_state
    last = hidden[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
    probabilities = torch.softmax(model.lm_head(last).float(), dim=-1)
    labels = probabilities[:, list(labels_of(tokenizer)[:2])]
    mass = labels.sum(dim=-1)
    return (labels[:, 0] / mass).tolist(), float(mass.min())


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, tasks: int, groups: int
) -> Evaluation:
    """Return results on held-out ranking tasks, and on groups of typed questions."""
    model.train(False)
    rng = random.Random(f"chance-{seed}")
    ndcgs: list[float] = []
    chance: list[float] = []
    for task in synthetic.draw_ranking_tasks(seed, tasks):
        prompt = synthetic.prompt_query(task.query_text)
        scores, _ = score_items(model, tokenizer, prompt, task.item_texts)
        ndcgs.append(synthetic.ndcg_at_k(scores, task.relevance, 10))
        chance.append(synthetic.ndcg_at_k([rng.random() for _ in scores], task.relevance, 10))
    typed = _typed(model, tokenizer, random.Random(f"typed-{seed}"), groups)
    model.train()
    return Evaluation(sum(ndcgs) / len(ndcgs), sum(chance) / len(chance), typed)


@torch.no_grad()
def _typed(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, rng: random.Random, groups: int
) -> dict[str, Typed]:
    label_ids = list(labels_of(tokenizer))
    answers: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for _ in range(groups):
        group = draw_typed_group(rng, QUESTIONS, held_out=True)
        batch = collate([pack_typed(tokenizer, group)])
        hidden = model.model(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions
        ).last_hidden_state
        shares = torch.softmax(model.lm_head(hidden[0, batch.columns]).float(), dim=-1)
        for asked, row in zip(group.questions, shares[:, label_ids], strict=True):
            own = row[[LABELS.index(label) for label in asked.question.labels]]
            answers[asked.topic].append((int(own.argmax()) == asked.right, float(own.sum())))
    return {
        topic: Typed(
            sum(right for right, _ in rows) / len(rows),
            min(mass for _, mass in rows),
            sum(mass for _, mass in rows) / len(rows),
            len(rows),
        )
        for topic, rows in sorted(answers.items())
    }
