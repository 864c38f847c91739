"""Train the embedded demonstration model from a seed.

    PYTHONPATH=training python -P -m demo.train --output DIR --seed 0

Writes the tokenizer, the configuration, the weights and a model card to DIR. First the model
learns to rank, then typed questions beside that; each part takes some half an hour on two CPU
cores. With --from DIR only the second part runs, on the weights that are there. It needs the
packages of the dev extra.
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
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo import synthetic
from demo.decisions import MOST_OPTIONS, draw_typed_group
from demo.evaluation import Evaluation, evaluate, labels_of
from demo.packing import NO_CONCEPT, PAD_ID, Batch, Row, collate, pack_ranking, pack_typed
from demo.world import CONCEPTS

END_OF_TEXT = "<|endoftext|>"
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


# The share of the second part in which questions are plain.
PLAIN_UNTIL = 0.15


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
    report_every: int = 50
    evaluate_every: int = 250
    typed_steps: int = 2400
    typed_groups: int = 8
    questions: int = 8
    typed_matrix_rate: float = 3e-3
    typed_other_rate: float = 1.5e-3


@dataclass(frozen=True)
class Rates:
    """The length of a part of training, and its highest learning rates."""

    steps: int
    matrix: float
    other: float


class Hints(torch.nn.Module):
    """Auxiliary heads that are dropped after training.

    One predicts from an early layer which attribute a word states, which brings synonyms together.
    The other predicts from a later layer if the query asked for it. Without them the model learns
    to match too, but far more slowly.
    """

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__()
        self.concept = torch.nn.Linear(settings.hidden_size, len(CONCEPTS))
        self.verdict = torch.nn.Linear(settings.hidden_size, 3)
        self.layers = (1, settings.layers - 1)

    def forward(self, states: Sequence[Tensor], hints: Tensor) -> tuple[Tensor, float]:
        """Return the loss, and the accuracy of the verdicts."""
        rows, columns, concepts, verdicts = hints.unbind(1)
        early, late = (
            functional.rms_norm(states[i][rows, columns], states[i].shape[-1:]) for i in self.layers
        )
        judged = self.verdict(late)
        named = self.concept(early)
        loss = 0.2 * functional.cross_entropy(named, concepts, ignore_index=NO_CONCEPT)
        loss = loss + 0.5 * functional.cross_entropy(judged, verdicts)
        return loss, float((judged.argmax(dim=-1) == verdicts).float().mean())


def main() -> None:
    """Train, evaluate and write the demonstration model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--from", type=Path, dest="start", help="folder of a model to go on with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=TrainingSettings.steps)
    parser.add_argument("--typed-steps", type=int, default=TrainingSettings.typed_steps)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for training")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = TrainingSettings(steps=args.steps, typed_steps=args.typed_steps)
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if args.start is None:
        tokenizer = train_tokenizer(args.seed, settings.vocab_size)
        torch.manual_seed(args.seed)
        model = build_model(settings, tokenizer.get_vocab_size())
        print(f"parameters: {sum(p.numel() for p in model.parameters())}")
        batches = draw_batches(random.Random(f"training-{args.seed}"), tokenizer, settings)
        rates = Rates(settings.steps, settings.matrix_rate, settings.other_rate)
        train(model, tokenizer, settings, batches, rates, args.output)
    else:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        model = build_model(settings, tokenizer.get_vocab_size())
        model.load_state_dict(load_file(args.start / "model.safetensors"), strict=False)
    torch.manual_seed(args.seed)
    batches = draw_typed_batches(random.Random(f"typed-{args.seed}"), tokenizer, settings)
    rates = Rates(settings.typed_steps, settings.typed_matrix_rate, settings.typed_other_rate)
    train(model, tokenizer, settings, batches, rates, args.output)
    evaluation = evaluate(model, tokenizer, seed=args.seed + 1000, tasks=100, groups=400)
    print(f"{evaluation}\n{(time.monotonic() - started) / 60:.1f} minutes")
    write_model(model, tokenizer, args.output)
    write_card(args.output, settings, args.seed, evaluation)


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


def train(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    settings: TrainingSettings,
    batches: Iterator[Batch],
    rates: Rates,
    output: Path,
) -> None:
    """Train on all batches.

    The model is also written at every evaluation, so an interrupted run leaves one behind.
    """
    hints = Hints(settings)
    optimizers = _optimizers(model, hints, settings, rates)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _rate(step, settings.warmup, rates.steps)
        )
        for optimizer in optimizers
    ]
    label_ids = labels_of(tokenizer)
    totals: list[tuple[float, ...]] = []
    started = time.monotonic()
    for step, batch in enumerate(batches, start=1):
        loss, *parts = batch_loss(model, hints, batch, label_ids)
        model.zero_grad(set_to_none=True)
        hints.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        totals.append((float(loss.detach()), *parts))
        if step % settings.report_every == 0:
            mean = [sum(column) / len(column) for column in zip(*totals, strict=True)]
            print(
                f"step {step} loss {mean[0]:.4f} answers {mean[1]:.4f} accuracy {mean[2]:.4f} "
                f"verdicts {mean[3]:.4f} {time.monotonic() - started:.0f}s",
                flush=True,
            )
            totals.clear()
        if step % settings.evaluate_every == 0:
            print(evaluate(model, tokenizer, seed=500, tasks=20, groups=60), flush=True)
            write_model(model, tokenizer, output)


def _optimizers(
    model: Qwen3ForCausalLM, hints: Hints, settings: TrainingSettings, rates: Rates
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train the layers' matrices with Muon, which leaves the plateau far sooner than AdamW."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in named if p.dim() == 1 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=rates.matrix,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [*others, *hints.parameters()],
        lr=rates.other,
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
    loss = -(batch.targets * logp).sum(dim=-1)
    loss = (loss * batch.weights).sum() / batch.weights.sum()
    # Where all answers are equally probable, none is right.
    known = (batch.weights == 1) & (batch.targets.amax(dim=-1) > 0.5)
    right = logp.argmax(dim=-1) == batch.targets.argmax(dim=-1)
    accuracy = float(right[known].float().mean())
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
        rows.sort(key=_length)
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
        rows.append(pack_ranking(rng, tokenizer, group))
    return rows


def draw_typed_batches(
    rng: random.Random, tokenizer: Tokenizer, settings: TrainingSettings
) -> Iterator[Batch]:
    """Draw batches of typed questions, with one of rankings after every two."""
    step = 0
    while step < settings.typed_steps:
        plain = step < settings.typed_steps * PLAIN_UNTIL
        count = settings.typed_groups * settings.pool
        groups = (draw_typed_group(rng, settings.questions, plain=plain) for _ in range(count))
        rows = sorted((pack_typed(tokenizer, group) for group in groups), key=_length)
        chunks = [
            rows[i : i + settings.typed_groups] for i in range(0, count, settings.typed_groups)
        ]
        stage = CURRICULUM[-1]
        for number in range(settings.pool // 2):
            is_long = number == 0
            chunks.append(
                _draw_rows(rng, tokenizer, settings.items, settings.typed_groups, stage, is_long)
            )
        rng.shuffle(chunks)
        step += len(chunks)
        yield from map(collate, chunks)


def _length(row: Row) -> int:
    return len(row.ids)


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
`no`, and typed questions about an item with `yes` or `no`, a letter or a digit. It exists so that
gpuscore can be tried and tested without a download. It knows only a small synthetic shopping
vocabulary: it is a demonstration, not a model for real use.

## Prompts

- Ranking: the query is `query: {{query}}\\nitem: ` (with the trailing space), the item is the plain
  item text, and the labels are `yes` and `no` (one token each), read after the item's last token.
  Text before `query:`, such as a preamble line, is allowed.
- Typed questions: the prompts of gpuscore's `/v1/systemone` and `/v1/decisions` for a model without
  a chat template. The state is an item's text or a ranking's prompt, or JSON with the fields `item`
  and `query`.

## Training

`PYTHONPATH=training python -P -m demo.train --output DIR --seed {seed}` trains the byte-level BPE
tokenizer and the model from scratch on text generated by `demo.synthetic` ({steps} steps) and
`demo.decisions` ({typed_steps} steps, a third of them rankings). A query asks for one to five
attributes (kind or category, colour, material, size, style, price, season, purpose). The target
for `yes` is {full:.2f} if the item states all of them. Otherwise it is between 0.01 and 0.40 and
grows with the share that the item states, so the score also ranks partial matches. It is not a
calibrated probability. Choices have up to {options} options, which have one letter each, and scores
up to ten levels. Some questions cannot be answered from the state; there all labels are equally
probable.

## Evaluation

100 held-out ranking tasks with 40 candidates each; the queries combine attributes in ways that
never occur in training. Mean nDCG@10: {ndcg:.3f}; random order: {chance:.3f}.

Typed questions about held-out combinations:

| question | number | right | mean probability of all labels |
| --- | --- | --- | --- |
{typed}

## Licence

Apache-2.0. The data is generated by the project; no other data was used.
"""


def write_card(output: Path, settings: TrainingSettings, seed: int, evaluation: Evaluation) -> None:
    """Write the model card."""
    text = _CARD.format(
        layers=settings.layers,
        hidden_size=settings.hidden_size,
        steps=settings.steps,
        typed_steps=settings.typed_steps,
        seed=seed,
        full=synthetic.answer_target(1, 1),
        ndcg=evaluation.ndcg,
        chance=evaluation.chance,
        typed=evaluation.table(),
        options=MOST_OPTIONS,
    )
    (output / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
