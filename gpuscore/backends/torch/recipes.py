"""Makes a `Recipe`: one pass over a checkpoint, layer by layer, with texts.

Texts go through every layer in float32 and in several forms of eight bits at once, each a stream of
its own. So only one layer is in memory at a time, and at the end the error of each form is known in
log p. The forms keep more and more products in 16 bits.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.eight_bits.judge import compared, values
from gpuscore.backends.common.eight_bits.recipe import Recipe
from gpuscore.backends.common.eight_bits.texts import Prompts, Questions
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.operators import TorchAttention
from gpuscore.backends.torch.decoder import Attend, Decoder, DecoderWeights, Rotary, Stream
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool
from gpuscore.backends.torch.launcher import WholeHead
from gpuscore.backends.torch.loader import Checkpoint
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.types.batch import NO_TOKENS, Float64Array, PackedBatch, Prefix, Segment, pack
from gpuscore_kernels.partial_attention import merge_partials

logger = logging.getLogger(__name__)

BATCH = 2048  # tokens
# The `GROUPS` that each form keeps in 16 bits. For what it saves, rounding loses most in `down`,
# whose rows are not rotated, then in `q`, and nearly nothing in `o`.
FORMS: tuple[tuple[str, ...], ...] = (
    (),
    ("down",),
    ("down", "q"),
    ("down", "q", "up"),
    ("down", "q", "up", "gate"),
)


def make_recipe(plan: TorchPlan, questions: Questions, digest: str, most_error: float) -> Recipe:
    """Find out which products of a plain checkpoint stay in 16 bits, and how the model answers in
    float32.

    No product of a quantised checkpoint is in 16 bits; it answers with its weights in float32, and
    with activations that are not rounded.

    Args:
        plan: of the model, with precision int8 or fp8.
        questions: the prompts.
        digest: of weights and texts.
        most_error: mean error in log p. Of the forms whose interval is below it, and within the
            other limits of the verdict, the cheapest is chosen; if none is, the most exact.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    with CheckpointFiles(Path(plan.directory), plan.architecture, "pt") as files, torch.no_grad():
        return _Pass(plan, files, questions).run(digest, most_error)


@dataclass(frozen=True, slots=True)
class _Part:
    """A batch of prompts, and its streams: in float32, and in each form of eight bits."""

    batch: PackedBatch
    scaled: bool  # its prompts decide the form
    streams: list[Stream]  # in float32; of scaled prompts also in each form
    rotary: Rotary
    attend: Attend
    kept: KeptRows


class _Pass:
    def __init__(self, plan: TorchPlan, files: CheckpointFiles, questions: Questions) -> None:
        self.plan, self.questions = plan, questions
        self.config = plan.architecture.config
        stored = plan.architecture.storage is not None
        self.forms = FORMS if plan.precision == "int8" and not stored else FORMS[:1]
        read = partial(Checkpoint, files, plan.architecture)
        # First the checkpoint of the stream in float32, then one for each form's stream.
        self.checkpoints = [
            read(torch.float32, plan.device, "w8a16" if stored else "full"),
            *(read(plan.dtype, plan.device, plan.precision, kept=kept) for kept in self.forms),
        ]
        # One layer more than there are: attention takes scored rows only in the last.
        longer = replace(
            self.config,
            num_layers=self.config.num_layers + 1,
            windows=(*self.config.windows, None),
        )
        pool = KVPool(longer, 1, plan.pages.size, plan.dtype, plan.device)
        self.pool = pool
        self.attention = TorchAttention(longer, pool, "reference", merge_partials)
        embed, norm, head = self.checkpoints[-1].beside_layers()
        matrix = self.checkpoints[1].rotation()  # the same for all forms that are rotated
        self.decoders = [
            Decoder(
                self.config,
                DecoderWeights(embed, (), norm, head, matrix if checkpoint.rotated else None),
            )
            for checkpoint in self.checkpoints
        ]

    def run(self, digest: str, most_error: float) -> Recipe:
        parts = [
            self._part(batch, scaled)
            for prompts, scaled in ((self.questions.scaled, True), (self.questions.held_out, False))
            for batch in self._batches(prompts)
        ]
        for index in range(self.config.num_layers):
            self._layer(index, parts)
        return Recipe(
            digest=digest,
            kept=self.forms[self._choose(parts, most_error)],
            prompts=self.questions.held_out,
            labels=self.questions.labels,
            answers=tuple(map(tuple, self._answers(parts, False, 0).tolist())),
        )

    def _part(self, batch: PackedBatch, scaled: bool) -> _Part:
        tokens = self._device(batch.token_ids)
        return _Part(
            batch,
            scaled,
            [(decoder.embed(tokens), None) for decoder in self.decoders[: None if scaled else 1]],
            self.decoders[0].rotary(self._device(batch.positions)),
            self.attention.prepare(batch).run,
            KeptRows.of(batch.slot_mapping, self.pool),
        )

    def _layer(self, index: int, parts: Sequence[_Part]) -> None:
        """Take all streams through a layer; one form of the layer is in memory at a time."""
        for number, checkpoint in enumerate(self.checkpoints):
            layer = checkpoint.layer(index)
            for part in parts:
                if number < len(part.streams):
                    how = part.rotary, part.attend, part.kept
                    stream = part.streams[number]
                    part.streams[number] = self.decoders[0].one_layer(index, layer, stream, *how)
            del layer

    def _choose(self, parts: Sequence[_Part], most_error: float) -> int:
        """Return the number of the cheapest form that is good enough."""
        expected = self._answers(parts, True, 0)
        every = range(len(self.forms))
        agreements = [compared(expected, self._answers(parts, True, form + 1)) for form in every]
        for kept, agreement in zip(self.forms, agreements, strict=True):
            logger.info("eight bits, %s in 16 bits: %s", ", ".join(kept) or "no product", agreement)
        sure = (form for form in every if agreements[form].at_most(most_error))
        return next(sure, every[-1])

    def _answers(self, parts: Sequence[_Part], scaled: bool, stream: int) -> Float64Array:
        """Return the `values` of the prompts of one kind, [prompts, labels]."""
        decoder = self.decoders[stream]
        head, weight = WholeHead("reference", self.config.final_softcap), decoder.weights
        answers = []
        for part in parts:
            if part.scaled is not scaled:
                continue
            rows = self._device(part.batch.score_rows)
            x, delta = part.streams[stream]
            hidden = decoder.final_norm(x[rows], None if delta is None else delta[rows])
            every, count = torch.arange(len(rows), device=rows.device), len(self.questions.labels)
            labels = self._device(part.batch.label_token_ids)
            numbers = every.repeat_interleave(count)
            logits = head.logits(hidden, weight.lm_head, numbers, labels)
            lse = head.statistics(hidden, weight.lm_head, every, 0).lse
            of_labels = logits.view(-1, count).double().cpu().numpy()
            of_all = lse.double().cpu().numpy()
            answers.append(values(of_labels, of_all, _count(self.config)))
        return np.concatenate(answers)

    def _batches(self, prompts: Prompts) -> Iterator[PackedBatch]:
        labels = np.array(self.questions.labels, dtype=np.int32)
        batch: list[Segment] = []
        for prompt in prompts:
            if sum(len(segment.token_ids) for segment in batch) + len(prompt) > BATCH:
                yield pack(batch, [Prefix(0, NO_TOKENS)] * len(batch))
                batch = []
            tokens = np.array(prompt, dtype=np.int32)
            batch.append(Segment(tokens, 0, len(batch), label_ids=labels, need_lse=True))
        yield pack(batch, [Prefix(0, NO_TOKENS)] * len(batch))

    def _device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.plan.device)


def _count(config: DecoderConfig) -> int | None:
    return None if config.classes is None else len(config.classes)
