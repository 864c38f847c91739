"""Reading a request's labels: texts, token ids, or sequences of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    EmptyLabels,
    InvalidRequest,
    LabelNotSingleToken,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.text.checks import PromptChecks
from gpuscore.text.classes import class_ids
from gpuscore.text.pieces import OverLimit
from gpuscore.text.score_input import ScoreInput, lists_of
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.text.turns import ALONE, Turns
from gpuscore.types.arrays import Int32Array
from gpuscore.types.label_trie import LabelTrie

SHOWN_IDS = 16  # ids in an error message

Labels = tuple[Int32Array, ...]  # the label ids of every item


@dataclass(frozen=True, slots=True)
class LabelReader:
    """The reader of labels for one model; `encoder` is None if it has no tokenizer."""

    encoder: TextEncoder | None
    checks: PromptChecks
    limits: RequestLimits

    def read(
        self, given: ScoreInput, default: Sequence[int] | None, turns: Turns
    ) -> tuple[Labels, LabelTrie | None]:
        """Return the label ids of every item, and the trie if a label has several tokens.

        Raises:
            GpuscoreError: the subclass that names the error in the labels.
        """
        given.check_labels(default)
        if given.labels is not None:
            self._check_count(len(given.labels), "labels")
        if given.label_sequences is not None:
            return self._trie(self._sequences(given.label_sequences), len(given.items))
        if given.labels is not None and (given.one_token or self.checks.backend.classes):
            return self.same(self._named(given.labels, turns), len(given.items)), None
        if given.labels is not None:
            return self._trie(self._tokenised(given.labels, turns), len(given.items))
        ids = given.label_token_ids if given.label_token_ids is not None else default or ()
        if lists := lists_of(ids):
            return self._of_items(lists, turns), None
        return self.same(list(ids), len(given.items)), None  # type: ignore[arg-type]

    def same(self, ids: Sequence[int], num_items: int) -> Labels:
        return (self.array(ids, "label_token_ids"),) * num_items

    def _of_items(self, lists: Sequence[Sequence[int]], turns: Turns) -> Labels:
        found: list[Int32Array] = []
        for index, ids in enumerate(lists):
            turns.before(len(ids))  # an id takes about as long as a character
            found.append(self.array(ids, f"label_token_ids[{index}]"))
        return tuple(found)

    def array(self, ids: Sequence[int], param: str) -> Int32Array:
        self._check_count(len(ids), param)
        return self.checks.label_ids(ids, param)

    def _trie(
        self, sequences: Sequence[Int32Array], num_items: int
    ) -> tuple[Labels, LabelTrie | None]:
        trie = LabelTrie.of(sequences)
        return (trie.first_ids,) * num_items, trie if trie.num_nodes else None

    def _named(self, labels: Sequence[str], turns: Turns) -> list[int]:
        """Return the tokens of labels of one token each, or the numbers of classes."""
        if self.checks.backend.classes is not None:
            return class_ids(labels, self.checks.backend.classes)
        return label_tokens(self._need_encoder(), labels, turns)

    def _tokenised(self, labels: Sequence[str], turns: Turns) -> list[Int32Array]:
        most, found = self.limits.max_label_tokens, list[Int32Array]()
        try:
            for tokens in self._need_encoder().plain(labels, turns, most):
                param = f"labels[{len(found)}]"
                if not len(tokens):
                    raise EmptyLabels(f"{param} is 0 tokens, it must be at least one", param=param)
                self._check_length(len(tokens), param)
                found.append(self.checks.label_ids(tokens, param))
        except OverLimit as over:
            param = f"labels[{len(found)}]"
            raise TooManyTokens(
                f"{param} is at least {over.least} tokens, the limit is {most}", param=param
            ) from None
        return found

    def _sequences(self, given: Sequence[Sequence[int]]) -> list[Int32Array]:
        self._check_count(len(given), "label_sequences")
        found: list[Int32Array] = []
        for index, ids in enumerate(given):
            param = f"label_sequences[{index}]"
            if len(ids) > 1 and self.checks.backend.classes is not None:
                raise InvalidRequest(
                    f"{param} has {len(ids)} numbers; this model's labels are classes, of one "
                    f"number each",
                    param=param,
                )
            self._check_length(len(ids), param)
            found.append(self.checks.label_ids(ids, param))
        return found

    def _check_count(self, count: int, param: str) -> None:
        if count > self.limits.max_labels:
            raise TooManyLabels(
                f"{count} labels, the limit is {self.limits.max_labels}", param=param
            )

    def _check_length(self, length: int, param: str) -> None:
        if length > self.limits.max_label_tokens:
            raise TooManyTokens(
                f"{param} is {length} tokens, the limit is {self.limits.max_label_tokens}",
                param=param,
            )

    def _need_encoder(self) -> TextEncoder:
        if self.encoder is None:
            raise InvalidRequest("this model has no tokenizer: send token ids", param="labels")
        return self.encoder


def label_tokens(encoder: TextEncoder, labels: Sequence[str], turns: Turns = ALONE) -> list[int]:
    """Return the token of each label, without special tokens.

    Raises:
        LabelNotSingleToken: a label is not exactly one token; the message has its ids, unless the
            label is very long.
    """
    found: list[int] = []
    try:
        for tokens in encoder.plain(labels, turns, 1):
            found.append(_single_token(tokens, f"labels[{len(found)}]"))
    except OverLimit as over:
        param = f"labels[{len(found)}]"
        raise LabelNotSingleToken(
            f"{param} is at least {over.least} tokens, it must be exactly one", param=param
        ) from None
    return found


def _single_token(tokens: Int32Array, param: str) -> int:
    """Return a label's only token; raise LabelNotSingleToken, which shows its tokens."""
    if len(tokens) == 1:
        return int(tokens[0])
    more = "" if len(tokens) <= SHOWN_IDS else ", ..."
    shown = ", ".join(map(str, tokens[:SHOWN_IDS].tolist())) + more
    raise LabelNotSingleToken(
        f"{param} is {len(tokens)} tokens ([{shown}]), it must be exactly one", param=param
    )
