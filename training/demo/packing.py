"""Lays out training rows: a prefix, then blocks that see it but not each other.

A ranking's prefix is its query, and its blocks are items; of typed questions it is the state, and
the blocks are questions.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import synthetic
from demo.asked import Asked
from demo.decision_texts import SINGLE as LABELS
from demo.decisions import TypedGroup
from demo.world import CONCEPTS

PAD_ID = 0
NO_CONCEPT = -100  # ignored by cross_entropy
QUESTION, ANSWER = "\n\n", "\n\nAnswer:\n"  # around a question, as in the server's prompts


@dataclass(frozen=True)
class Answer:
    """A place where the model has to answer: column, probability by label, weight in the loss."""

    column: int
    targets: dict[str, float]
    weight: float = 1.0


@dataclass(frozen=True)
class Hint:
    """A place where an attribute has been named, and how it is to be judged."""

    column: int
    concept: int
    verdict: int


@dataclass(frozen=True)
class Row:
    """One packed row before padding; `blocks` is 0 for tokens of the prefix."""

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    answers: list[Answer] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def append(self, ids: Sequence[int]) -> int:
        """Add a block after the prefix; return its first column."""
        start, prefix = len(self.ids), self.blocks.count(0)
        self.ids.extend(ids)
        self.positions.extend(range(prefix, prefix + len(ids)))
        self.blocks.extend([self.blocks[-1] + 1] * len(ids))
        return start


@dataclass(frozen=True)
class Batch:
    """Padded rows.

    Attributes:
        ids, positions: [B, T].
        mask: [B, 1, T, T], True where a token is seen.
        rows, columns: [A], the places of the answers.
        targets: [A, L], probabilities of `LABELS`.
        weights: [A].
        hints: [H, 4], row, column, concept and verdict.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    weights: Tensor
    hints: Tensor


def pack_ranking(rng: random.Random, tokenizer: Tokenizer, group: synthetic.TrainingGroup) -> Row:
    """Lay out a query and its items; answers are asked for after every stated attribute."""
    prompt = synthetic.prompt_query(group.query.text, group.preamble)
    texts = [item.text for item in group.items]
    shift = 0
    if rng.random() < 0.5:
        # Tokenizing query and item as one text moves the space into the item's first token;
        # train on both forms, since callers may do either.
        prompt, texts, shift = prompt[:-1], [f" {text}" for text in texts], 1
    row = _begun(tokenizer, prompt)
    for item, encoded in zip(group.items, tokenizer.encode_batch(texts), strict=True):
        start = row.append(encoded.ids)
        ends = [end - shift for _, end in encoded.offsets]
        row.answers.extend(_judged(group.query, item, ends, start))
        row.hints.extend(
            Hint(
                start + ends.index(statement.end),
                _concept(statement.slot, statement.value),
                synthetic.verdict(group.query, statement),
            )
            for statement in item.statements
            if statement.end in ends
        )
    return row


def pack_typed(tokenizer: Tokenizer, group: TypedGroup) -> Row:
    """Lay out a state and questions about it; each is answered at its end."""
    row = _begun(tokenizer, group.state + QUESTION)
    texts = [asked.question.text + ANSWER for asked in group.questions]
    for asked, encoded in zip(group.questions, tokenizer.encode_batch(texts), strict=True):
        start = row.append(encoded.ids)
        row.answers.append(Answer(len(row.ids) - 1, asked.targets()))
        row.hints.extend(_hints(group, asked, [end for _, end in encoded.offsets], start))
    return row


def _begun(tokenizer: Tokenizer, prefix: str) -> Row:
    ids = tokenizer.encode(prefix).ids
    return Row(list(ids), list(range(len(ids))), [0] * len(ids))


def _judged(
    query: synthetic.Query, item: synthetic.Item, ends: Sequence[int], start: int
) -> Iterator[Answer]:
    """Yield the answer at each statement's end, where the item so far is a whole item."""
    asked = len(query.requested)
    marks = {s.end for s in item.statements} | {len(item.text)}
    for column, end in enumerate(ends):
        if end in marks:
            held = synthetic.held_count(query, item, upto=end)
            yes = synthetic.answer_target(held, asked)
            # Only answers at the end of an item are used for scoring; the others help training.
            weight = 1.0 if column == len(ends) - 1 else 0.3
            yield Answer(start + column, {"yes": yes, "no": 1 - yes}, weight)


def _hints(group: TypedGroup, asked: Asked, ends: Sequence[int], start: int) -> Iterator[Hint]:
    for mention in asked.mentions:
        if mention.end in ends:
            known = group.attributes.get(mention.slot)
            verdict = 0 if known is None else 1 if known == mention.value else 2
            concept = _concept(mention.slot, mention.value)
            yield Hint(start + ends.index(mention.end), concept, verdict)


def _concept(slot: str, value: str) -> int:
    concept = (slot, value)
    return CONCEPTS.index(concept) if concept in CONCEPTS else NO_CONCEPT


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to one length and build the mask that keeps blocks apart."""
    width = max(len(row.ids) for row in rows)

    def padded(values: Sequence[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*v, *[fill] * (width - len(v))] for v in values])

    blocks = padded([row.blocks for row in rows], -1)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    prefix = (blocks == 0)[:, None, :]
    answers = [(i, answer) for i, row in enumerate(rows) for answer in row.answers]
    hints = [
        (i, hint.column, hint.concept, hint.verdict)
        for i, row in enumerate(rows)
        for hint in row.hints
    ]
    return Batch(
        ids=padded([row.ids for row in rows], PAD_ID),
        positions=padded([row.positions for row in rows], 0),
        mask=(causal & (same | prefix))[:, None],
        rows=torch.tensor([i for i, _ in answers]),
        columns=torch.tensor([answer.column for _, answer in answers]),
        targets=torch.tensor(
            [[answer.targets.get(label, 0.0) for label in LABELS] for _, answer in answers]
        ),
        weights=torch.tensor([answer.weight for _, answer in answers]),
        hints=torch.tensor(hints, dtype=torch.long).reshape(-1, 4),
    )
