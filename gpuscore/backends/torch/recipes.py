"""Makes a `Recipe`: one pass over a checkpoint, layer by layer, with texts.

Texts go through every layer in 16 bits and in several forms of eight bits at once, each a stream of
its own. So only one layer is in memory at a time, and at the end the error of each form is known in
log p. A form takes rows twice where taking them once loses more than a limit.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpuscore.backends.common.checkpoint import CheckpointFiles
from gpuscore.backends.common.eight_bits.judge import compared, values
from gpuscore.backends.common.eight_bits.recipe import GROUPS, Recipe
from gpuscore.backends.common.eight_bits.texts import Prompts, Questions
from gpuscore.backends.common.hf_config import DecoderConfig
from gpuscore.backends.torch.attention.operators import TorchAttention
from gpuscore.backends.torch.decoder import (
    Attend,
    Decoder,
    DecoderWeights,
    LayerWeights,
    MlpWeights,
    Rotary,
    Stream,
)
from gpuscore.backends.torch.kv_pool import KeptRows, KVPool
from gpuscore.backends.torch.launcher import WholeHead
from gpuscore.backends.torch.linear import taking_twice
from gpuscore.backends.torch.loader import Checkpoint
from gpuscore.backends.torch.plan import TorchPlan
from gpuscore.types.batch import NO_TOKENS, Float64Array, PackedBatch, Prefix, Segment, pack
from gpuscore_kernels.partial_attention import merge_partials

logger = logging.getLogger(__name__)

BATCH = 2048  # tokens
# Limits of the forms: what a product may lose by taking rows once, see `_lost`; 0: all are taken
# twice.
FORMS = (math.inf, 0.01, 0.007, 0.005, 0.0)


def make_recipe(plan: TorchPlan, questions: Questions, digest: str, most_error: float) -> Recipe:
    """Find out which products of a plain checkpoint take rows twice.

    Args:
        plan: of the model, with precision int8.
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
    """A batch of prompts, and its streams: in 16 bits, and in each form of eight bits."""

    batch: PackedBatch
    scaled: bool  # its prompts decide passes
    streams: list[Stream]  # in 16 bits; of scaled prompts also in each form
    rotary: Rotary
    attend: Attend
    kept: KeptRows


class _Pass:
    def __init__(self, plan: TorchPlan, files: CheckpointFiles, questions: Questions) -> None:
        self.plan, self.questions = plan, questions
        self.config = plan.architecture.config
        read = partial(Checkpoint, files, plan.architecture, plan.dtype, plan.device)
        self.full, self.eight = read("full"), read(plan.precision)
        self.forms = FORMS if plan.precision == "int8" else FORMS[:1]
        # One layer more than there are: attention takes scored rows only in the last.
        longer = replace(
            self.config,
            num_layers=self.config.num_layers + 1,
            windows=(*self.config.windows, None),
        )
        pool = KVPool(longer, 1, plan.pages.size, plan.dtype, plan.device)
        self.pool = pool
        self.attention = TorchAttention(longer, pool, "reference", merge_partials)
        embed, norm, head = self.full.beside_layers()
        outer = DecoderWeights(embed, (), norm, head)
        self.decoder = Decoder(self.config, outer)

    def run(self, digest: str, most_error: float) -> Recipe:
        parts = [
            self._part(batch, scaled)
            for prompts, scaled in ((self.questions.scaled, True), (self.questions.held_out, False))
            for batch in self._batches(prompts)
        ]
        twice = [self._layer(index, parts) for index in range(self.config.num_layers)]
        chosen = self._choose(parts, most_error)
        return Recipe(
            digest=digest,
            twice=tuple(of_forms[chosen] for of_forms in twice),
            prompts=self.questions.held_out,
            labels=self.questions.labels,
            answers=tuple(map(tuple, self._answers(parts, False, 0).tolist())),
        )

    def _part(self, batch: PackedBatch, scaled: bool) -> _Part:
        count = 1 + (len(self.forms) if scaled else 0)
        return _Part(
            batch,
            scaled,
            [(self.decoder.embed(self._device(batch.token_ids)), None)] * count,
            self.decoder.rotary(self._device(batch.positions)),
            self.attention.prepare(batch).run,
            KeptRows.of(batch.slot_mapping, self.pool),
        )

    def _layer(self, index: int, parts: Sequence[_Part]) -> list[tuple[str, ...]]:
        """Take all streams through a layer; return the groups that each form takes twice."""
        lost = self._lost(index, eight := self.eight.layer(index), parts[0])
        logger.debug("layer %d: lost %s", index, {g: f"{v:.5f}" for g, v in lost.items()})
        of_forms = [tuple(g for g in lost if lost[g] >= limit) for limit in self.forms]
        layers = [self.full.layer(index), *(with_passes(eight, groups) for groups in of_forms)]
        for part in parts:
            streams = zip(layers, part.streams, strict=False)
            part.streams[:] = [self._through(index, *one, part) for one in streams]
        return of_forms

    def _lost(self, index: int, eight: LayerWeights, part: _Part) -> dict[str, float]:
        """Return how far each group takes the stream in 16 bits off if it takes rows once.

        All others take them twice. In parts of the stream behind the layer, as a mean over rows:
        the rows of first tokens are larger than all others by far.
        """
        if self.plan.precision != "int8":
            return {}

        def after(*groups: str) -> Tensor:
            layer = with_passes(eight, groups)
            x, delta = self._through(index, layer, part.streams[0], part)
            return x.float() if delta is None else x.float() + delta.float()

        want = after(*GROUPS)
        size = want.norm(dim=1).clamp(min=1e-30)
        every = {group: after(*(one for one in GROUPS if one != group)) for group in GROUPS}
        return {g: float(((x - want).norm(dim=1) / size).mean()) for g, x in every.items()}

    def _through(self, index: int, layer: LayerWeights, stream: Stream, part: _Part) -> Stream:
        how = part.rotary, part.attend, part.kept
        return self.decoder.one_layer(index, layer, stream, *how)

    def _choose(self, parts: Sequence[_Part], most_error: float) -> int:
        """Return the number of the cheapest form that is good enough."""
        want = self._answers(parts, True, 0)
        every = range(len(self.forms))
        agreements = [compared(want, self._answers(parts, True, form + 1)) for form in every]
        for limit, agreement in zip(self.forms, agreements, strict=True):
            logger.info("eight bits, rows once up to a loss of %g: %s", limit, agreement)
        sure = (form for form in every if agreements[form].at_most(most_error))
        return next(sure, every[-1])

    def _answers(self, parts: Sequence[_Part], scaled: bool, stream: int) -> Float64Array:
        """Return the `values` of the prompts of one kind, [prompts, labels]."""
        head, weight = WholeHead("reference", self.config.final_softcap), self.decoder.weights
        found = []
        for part in parts:
            if part.scaled is not scaled:
                continue
            rows = self._device(part.batch.score_rows)
            x, delta = part.streams[stream]
            hidden = self.decoder.final_norm(x[rows], None if delta is None else delta[rows])
            every, count = torch.arange(len(rows), device=rows.device), len(self.questions.labels)
            labels = self._device(part.batch.label_token_ids)
            numbers = every.repeat_interleave(count)
            logits = head.logits(hidden, weight.lm_head, numbers, labels)
            lse = head.statistics(hidden, weight.lm_head, every, 0).lse
            of_labels = logits.view(-1, count).double().cpu().numpy()
            of_all = lse.double().cpu().numpy()
            found.append(values(of_labels, of_all, _count(self.config)))
        return np.concatenate(found)

    def _batches(self, prompts: Prompts) -> Iterator[PackedBatch]:
        labels = np.array(self.questions.labels, dtype=np.int32)
        batch: list[Segment] = []
        for prompt in prompts:
            if sum(len(one.token_ids) for one in batch) + len(prompt) > BATCH:
                yield pack(batch, [Prefix(0, NO_TOKENS)] * len(batch))
                batch = []
            tokens = np.array(prompt, dtype=np.int32)
            batch.append(Segment(tokens, 0, len(batch), label_ids=labels, need_lse=True))
        yield pack(batch, [Prefix(0, NO_TOKENS)] * len(batch))

    def _device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self.plan.device)


def with_passes(layer: LayerWeights, groups: Sequence[str]) -> LayerWeights:
    """Return a layer in eight bits in which the rows of these `GROUPS` are taken twice."""
    mlp = layer.mlp
    if isinstance(mlp, MlpWeights):
        gate_up = taking_twice(mlp.gate_up, "gate" in groups)
        mlp = MlpWeights(gate_up, taking_twice(mlp.down, "down" in groups))
    qkv, o = taking_twice(layer.qkv, "q" in groups), taking_twice(layer.o, "o" in groups)
    return replace(layer, qkv=qkv, o=o, mlp=mlp)


def _count(config: DecoderConfig) -> int | None:
    return None if config.classes is None else len(config.classes)
