"""Train the embedded demonstration model from a seed.

    PYTHONPATH=training python -P -m demo.train --output DIR --seed 0

Writes the tokenizer, the configuration, the weights and a model card to DIR. Training takes
about a quarter of an hour on two CPU cores. It needs the packages of the dev extra.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo import synthetic

END_OF_TEXT = "<|endoftext|>"
PAD_ID = 0
# The pre-tokenizer of Qwen models: contractions, words with one leading space, single digits,
# punctuation runs, white space.
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum, up to a share of all steps."""

    until: float
    groups: int
    max_attributes: int
    plain: bool


# The model learns to match words only after a plateau. Many small batches of plain texts end the
# plateau soonest.
CURRICULUM = (
    Stage(until=0.14, groups=8, max_attributes=1, plain=True),
    Stage(until=0.26, groups=8, max_attributes=3, plain=True),
    Stage(until=1.0, groups=16, max_attributes=synthetic.MAX_ATTRIBUTES, plain=False),
)


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides the training run besides the seed."""

    vocab_size: int = 1792
    hidden_size: int = 128
    layers: int = 4
    intermediate_size: int = 384
    query_heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    max_positions: int = 4096
    rope_theta: float = 1000000.0
    steps: int = 3200
    items: int = 8
    pool: int = 8
    long_groups: int = 8
    matrix_rate: float = 4e-3
    other_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: int = 100
    report_every: int = 100
    evaluate_every: int = 500


@dataclass(frozen=True)
class Batch:
    """Rows of one query each, followed by items that see the query but not each other."""

    ids: Tensor
    positions: Tensor
    mask: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    weights: Tensor
    final: Tensor
    hints: Tensor


@dataclass(frozen=True)
class Row:
    """One packed row before padding; `answers` holds (column, target, is the item's end).

    `hints` holds (column, concept, verdict) for every statement of the items.
    """

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    answers: list[tuple[int, float, bool]]
    hints: list[tuple[int, int, int]]


class Hints(torch.nn.Module):
    """Auxiliary heads that are dropped after training.

    One predicts from an early layer which attribute a word states, which brings synonyms together.
    The other predicts from a later layer if the query asked for it. Without them the model learns
    to match too, but far more slowly.
    """

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__()
        self.concept = torch.nn.Linear(settings.hidden_size, len(synthetic.CONCEPTS))
        self.verdict = torch.nn.Linear(settings.hidden_size, 3)
        self.layers = (1, settings.layers - 1)

    def forward(self, states: Sequence[Tensor], hints: Tensor) -> tuple[Tensor, float]:
        """Return the loss, and the accuracy of the verdicts."""
        rows, columns, concepts, verdicts = hints.unbind(1)
        early, late = (
            functional.rms_norm(states[i][rows, columns], states[i].shape[-1:]) for i in self.layers
        )
        judged = self.verdict(late)
        loss = 0.2 * functional.cross_entropy(self.concept(early), concepts)
        loss = loss + 0.5 * functional.cross_entropy(judged, verdicts)
        return loss, float((judged.argmax(dim=-1) == verdicts).float().mean())


def main() -> None:
    """Train, evaluate and write the demonstration model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=TrainingSettings.steps)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for training")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = TrainingSettings(steps=args.steps)
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.seed, settings.vocab_size)
    started = time.monotonic()
    model = train_model(tokenizer, settings, args.seed, args.output)
    minutes = (time.monotonic() - started) / 60
    ndcg, chance = evaluate(model, tokenizer, seed=args.seed + 1000, tasks=100)
    print(f"held-out nDCG@10 {ndcg:.4f}, random order {chance:.4f}, {minutes:.1f} minutes")
    write_model(model, tokenizer, args.output)
    write_card(args.output, settings, args.seed, ndcg, chance)


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which the labels are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    for label in synthetic.LABELS:
        for text in (label, f" {label}"):
            if len(tokenizer.encode(text).ids) != 1:
                raise RuntimeError(f"{text!r} is not a single token")
    return tokenizer


def _corpus(seed: int) -> Iterator[str]:
    rng = random.Random(f"corpus-{seed}")
    for i in range(12000):
        group = synthetic.draw_training_group(rng, 2, long_text=i % 8 == 0)
        label = synthetic.LABELS[i % 2]
        yield synthetic.prompt_query(group.query.text, group.preamble)
        # Items occur both alone and after a space, and the labels likewise.
        yield from (group.items[0].text, f" {group.items[1].text}", label, f" {label}")


def build_model(settings: TrainingSettings, vocab_size: int) -> Qwen3ForCausalLM:
    """Build the untrained model."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=settings.query_heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        use_cache=False,
        initializer_range=0.04,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=PAD_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3ForCausalLM(config)


def train_model(
    tokenizer: Tokenizer, settings: TrainingSettings, seed: int, output: Path
) -> Qwen3ForCausalLM:
    """Train with soft yes/no targets at the end of every item and of every stated attribute.

    The model is also written at every evaluation, so an interrupted run leaves one behind.
    """
    torch.manual_seed(seed)
    rng = random.Random(f"training-{seed}")
    model = build_model(settings, tokenizer.get_vocab_size())
    print(f"parameters: {sum(p.numel() for p in model.parameters())}")
    hints = Hints(settings)
    optimizers = _optimizers(model, hints, settings)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _rate(step, settings.warmup, settings.steps)
        )
        for optimizer in optimizers
    ]
    label_ids = labels_of(tokenizer)
    totals: list[tuple[float, ...]] = []
    started = time.monotonic()
    for step, batch in enumerate(draw_batches(rng, tokenizer, settings), start=1):
        loss, *rates = batch_loss(model, hints, batch, label_ids)
        model.zero_grad(set_to_none=True)
        hints.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        totals.append((float(loss.detach()), *rates))
        if step % settings.report_every == 0:
            mean = [sum(column) / len(column) for column in zip(*totals, strict=True)]
            print(
                f"step {step} loss {mean[0]:.4f} answers {mean[1]:.4f} accuracy {mean[2]:.4f} "
                f"verdicts {mean[3]:.4f} {time.monotonic() - started:.0f}s",
                flush=True,
            )
            totals.clear()
        if step % settings.evaluate_every == 0:
            ndcg, chance = evaluate(model, tokenizer, seed=seed + 500, tasks=20)
            print(f"step {step} nDCG@10 {ndcg:.4f} (random {chance:.4f})", flush=True)
            write_model(model, tokenizer, output)
    return model


def _optimizers(
    model: Qwen3ForCausalLM, hints: Hints, settings: TrainingSettings
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train the layers' matrices with Muon, which leaves the plateau far sooner than AdamW."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in named if p.dim() == 1 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=settings.matrix_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [*others, *hints.parameters()],
        lr=settings.other_rate,
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    return muon, adam


def _rate(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    # The last pool of batches may run a few steps over.
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * done))


def labels_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of the labels."""
    return tuple(tokenizer.encode(label).ids[0] for label in synthetic.LABELS)


def batch_loss(
    model: Qwen3ForCausalLM, hints: Hints, batch: Batch, label_ids: Sequence[int]
) -> tuple[Tensor, float, float, float]:
    """Return the loss to descend, then the loss of the answers and the two accuracies."""
    states = model.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        position_ids=batch.positions,
        output_hidden_states=True,
    ).hidden_states
    logits = model.lm_head(states[-1][batch.rows, batch.columns])
    # The softmax is over the whole vocabulary, so that the labels learn to take all probability.
    logp = torch.log_softmax(logits, dim=-1)[:, list(label_ids)]
    loss = -(batch.targets * logp[:, 0] + (1 - batch.targets) * logp[:, 1])
    loss = (loss * batch.weights).sum() / batch.weights.sum()
    right = (logp[:, 0] > logp[:, 1]) == (batch.targets > 0.5)
    accuracy = float(right[batch.final].float().mean())
    hint_loss, judged = hints(states, batch.hints)
    return loss + hint_loss, float(loss.detach()), accuracy, judged


def draw_batches(
    rng: random.Random, tokenizer: Tokenizer, settings: TrainingSettings
) -> Iterator[Batch]:
    """Draw all batches along the curriculum; later stages mix in batches of long queries."""
    step = 0
    while step < settings.steps:
        stage = next(stage for stage in CURRICULUM if step < settings.steps * stage.until)
        count = stage.groups * settings.pool
        rows = _draw_rows(rng, tokenizer, settings.items, count, stage)
        # Rows of similar length share a batch, to keep padding small.
        rows.sort(key=lambda row: len(row.ids))
        chunks = [rows[i : i + stage.groups] for i in range(0, count, stage.groups)]
        if not stage.plain:
            rows = _draw_rows(rng, tokenizer, settings.items, settings.long_groups, stage, True)
            chunks.append(rows)
        rng.shuffle(chunks)
        step += len(chunks)
        yield from map(collate, chunks)


def _draw_rows(
    rng: random.Random,
    tokenizer: Tokenizer,
    n_items: int,
    count: int,
    stage: Stage,
    long_text: bool = False,
) -> list[Row]:
    rows = []
    for _ in range(count):
        group = synthetic.draw_training_group(
            rng, n_items, stage.max_attributes, long_text, stage.plain
        )
        rows.append(pack_row(rng, tokenizer, group))
    return rows


def pack_row(rng: random.Random, tokenizer: Tokenizer, group: synthetic.TrainingGroup) -> Row:
    """Lay out the query and then its items, each at the positions right after the query."""
    prompt = synthetic.prompt_query(group.query.text, group.preamble)
    texts = [item.text for item in group.items]
    shift = 0
    if rng.random() < 0.5:
        # Tokenizing query and item as one text moves the space into the item's first token;
        # train on both forms, since callers may do either.
        prompt, texts, shift = prompt[:-1], [f" {text}" for text in texts], 1
    prefix = tokenizer.encode(prompt).ids
    row = Row(list(prefix), list(range(len(prefix))), [0] * len(prefix), [], [])
    for block, (item, encoded) in enumerate(
        zip(group.items, tokenizer.encode_batch(texts), strict=True), start=1
    ):
        start = len(row.ids)
        row.ids.extend(encoded.ids)
        row.positions.extend(range(len(prefix), len(prefix) + len(encoded.ids)))
        row.blocks.extend([block] * len(encoded.ids))
        ends = [end - shift for _, end in encoded.offsets]
        row.answers.extend(
            (start + column, target, column == len(ends) - 1)
            for column, target in _answers(group.query, item, ends)
        )
        row.hints.extend(
            (
                start + ends.index(statement.end),
                synthetic.CONCEPTS.index((statement.slot, statement.value)),
                synthetic.verdict(group.query, statement),
            )
            for statement in item.statements
            if statement.end in ends
        )
    return row


def _answers(
    query: synthetic.Query, item: synthetic.Item, ends: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Yield (column, target) at each statement's end, where the item so far is a whole item."""
    asked = len(query.requested)
    marks = {s.end for s in item.statements} | {len(item.text)}
    for column, end in enumerate(ends):
        if end in marks:
            held = synthetic.held_count(query, item, upto=end)
            yield column, synthetic.answer_target(held, asked)


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to one length and build the mask that keeps items apart."""
    width = max(len(row.ids) for row in rows)

    def padded(values: Sequence[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*v, *[fill] * (width - len(v))] for v in values])

    blocks = padded([row.blocks for row in rows], -1)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    query = (blocks == 0)[:, None, :]
    answers = [(i, *answer) for i, row in enumerate(rows) for answer in row.answers]
    index, columns, targets, final = zip(*answers, strict=True)
    hints = [(i, *hint) for i, row in enumerate(rows) for hint in row.hints]
    is_final = torch.tensor(final)
    return Batch(
        ids=padded([row.ids for row in rows], PAD_ID),
        positions=padded([row.positions for row in rows], 0),
        mask=(causal & (same | query))[:, None],
        rows=torch.tensor(index),
        columns=torch.tensor(columns),
        targets=torch.tensor(targets),
        # Only answers at the end of an item are used for scoring; the others help training.
        weights=torch.where(is_final, 1.0, 0.3),
        final=is_final,
        hints=torch.tensor(hints),
    )


@torch.no_grad()
def score_items(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, items: Sequence[str]
) -> tuple[list[float], float]:
    """Return p("yes") among the labels per item, and the least mass that the labels had.

    This runs plain padded rows without the training layout, as a user of the model would.
    """
    prefix = tokenizer.encode(prompt).ids
    rows = [prefix + encoded.ids for encoded in tokenizer.encode_batch(list(items))]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in rows])
    hidden = model.model(input_ids=ids).last_hidden_state
    last = hidden[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
    probabilities = torch.softmax(model.lm_head(last).float(), dim=-1)
    labels = probabilities[:, list(labels_of(tokenizer))]
    mass = labels.sum(dim=-1)
    return (labels[:, 0] / mass).tolist(), float(mass.min())


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, tasks: int
) -> tuple[float, float]:
    """Return the mean held-out nDCG@10 of the model and of random order."""
    model.train(False)
    rng = random.Random(f"chance-{seed}")
    found: list[float] = []
    chance: list[float] = []
    for task in synthetic.draw_ranking_tasks(seed, tasks):
        prompt = synthetic.prompt_query(task.query_text)
        scores, _ = score_items(model, tokenizer, prompt, task.item_texts)
        found.append(synthetic.ndcg_at_k(scores, task.relevance, 10))
        chance.append(synthetic.ndcg_at_k([rng.random() for _ in scores], task.relevance, 10))
    model.train()
    return sum(found) / len(found), sum(chance) / len(chance)


def write_model(model: Qwen3ForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write the configuration, the weights (tied head left out) and the tokenizer."""
    config = model.config.to_dict()
    config.update(architectures=["Qwen3ForCausalLM"], dtype="float32", use_cache=True)
    # Readers of the older layout expect this name.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    dropped = ("_name_or_path", "transformers_version")
    config = {k: v for k, v in config.items() if v is not None and k not in dropped}
    _write_json(output / "config.json", config)
    weights = {
        name: tensor.detach().float().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(output / "tokenizer_config.json", settings)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_CARD = """\
---
license: apache-2.0
language: en
---

# gpuscore demo model

This is a tiny causal language model of the Qwen3 architecture ({layers} layers, hidden size
{hidden_size}, float32). It answers "does this item match this query" with the next token `yes` or
`no`. It exists so that gpuscore can be tried and tested without a download. It knows only a small
synthetic shopping vocabulary: it is a demonstration, not a reranker for real use.

## Prompt

The query is `query: {{query}}\\nitem: ` (with the trailing space), the item is the plain item
text, and the labels are `yes` and `no` (one token each), read after the item's last token.
Text before `query:`, such as a preamble line, is allowed.

## Training

`PYTHONPATH=training python -P -m demo.train --output DIR --seed {seed}` trains the byte-level BPE
tokenizer and the model from scratch on text generated by `demo.synthetic` ({steps} steps). A query
asks for one to five attributes (kind or category, colour, material, size, style, price, season,
purpose). The target for `yes` is {full:.2f} if the item states all of them. Otherwise it is
between 0.01 and 0.40 and grows with the share that the item states, so the score also ranks partial
matches. It is not a calibrated probability.

## Evaluation

100 held-out ranking tasks with 40 candidates each; the queries combine attributes in ways that
never occur in training. Mean nDCG@10: {ndcg:.3f}; random order: {chance:.3f}.

## Licence

Apache-2.0. The data is generated by the project; no other data was used.
"""


def write_card(
    output: Path, settings: TrainingSettings, seed: int, ndcg: float, chance: float
) -> None:
    """Write the model card."""
    text = _CARD.format(
        layers=settings.layers,
        hidden_size=settings.hidden_size,
        steps=settings.steps,
        seed=seed,
        full=synthetic.answer_target(1, 1),
        ndcg=ndcg,
        chance=chance,
    )
    (output / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
