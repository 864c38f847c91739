"""The answer of /v1/completions, made one prompt and a few positions at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuscore.dialects.answers import CompletionAnswer, CompletionChoice, Logprobs
from gpuscore.dialects.dialect import (
    COUNT_BYTES,
    HOLE,
    NUMBER_BYTES,
    NUMBERS,
    ROWS,
    in_pieces,
    list_json,
    text_bytes,
    text_json,
)
from gpuscore.dialects.wire import PromptTokensDetails, TokenUsage
from gpuscore.text.candidates import Candidates, PromptRows, following
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import NO_TOKENS, Float64Array, Int32Array
from gpuscore.types.request import ScoreResult

_CHOICE_BYTES = 192  # the names of a choice's fields and its index


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """The parts of a choice that the request asks for."""

    echo: bool  # the prompt itself
    next_token: bool  # the most probable token after it
    logprobs: int | None  # 0: of the returned tokens; n: also of the n most probable tokens

    @property
    def every_position(self) -> bool:
        return self.echo and self.logprobs is not None


@dataclass(frozen=True, slots=True)
class SentPrompts:
    """The prompts of a body.

    Args:
        ids: the token ids of each prompt.
        texts: the prompts as they were sent; None if they were token ids.
        encoder: the model's tokenizer, if it has one.
        vocab_rows: number of the model's token ids.
        candidates: the tokens whose log-probabilities are asked for.
    """

    ids: Sequence[Int32Array]
    texts: Sequence[str] | None
    encoder: TextEncoder | None
    vocab_rows: int
    candidates: Candidates | None = None

    def text(self, index: int, say: "TokenTexts") -> str:
        """Return the text of a prompt. Without a tokenizer, `say` gives it token by token."""
        if self.texts is not None:
            return self.texts[index]
        ids = self.ids[index].tolist()
        return "".join(map(say, ids)) if self.encoder is None else self.encoder.text(ids)

    def most_bytes(self, options: CompletionOptions) -> int:
        """Return the most bytes of the choices for these prompts."""
        token = TokenTexts.longest(self.encoder, self.vocab_rows)
        prompts = len(self.ids)
        tokens = sum(map(len, self.ids))
        count = (tokens if options.every_position else 0) + (prompts if options.next_token else 0)
        size = prompts * (_CHOICE_BYTES + token)
        if self.candidates is not None:
            size += NUMBER_BYTES * self.candidates.count(self.ids) + 3 * tokens
        if options.logprobs is not None:
            entry = token + NUMBER_BYTES
            top = options.logprobs and 3 + entry * (options.logprobs + 1)
            size += count * (entry + COUNT_BYTES + top)
        if not options.echo:
            return size
        if self.texts is not None:
            return size + text_bytes(*self.texts)
        return size + 2 * token * tokens  # in one text a token may take more than alone


class TokenTexts:
    """The text of each token by itself; `token_id:N` for a token without text."""

    def __init__(self, encoder: TextEncoder | None) -> None:
        self._encoder = encoder
        self._texts: dict[int, str] = {}

    def add(self, *parts: Int32Array) -> Iterator[bytes]:
        """Read the texts of all tokens in these arrays; yield wherever the work may pause."""
        ids = np.unique(np.concatenate([part.reshape(-1) for part in parts])).tolist()
        for start in range(0, len(ids), ROWS):
            some = ids[start : start + ROWS]
            texts = [""] * len(some) if self._encoder is None else self._encoder.token_texts(some)
            self._texts.update(zip(some, texts, strict=True))
            yield b""

    @staticmethod
    @lru_cache(maxsize=8)
    def longest(encoder: TextEncoder | None, vocab_rows: int) -> int:
        """Return the most bytes of JSON that a token takes, with a comma."""
        most = len(TokenTexts.name(vocab_rows)) + 3
        for start in range(0, vocab_rows if encoder else 0, NUMBERS):
            some = range(start, min(start + NUMBERS, vocab_rows))
            texts = encoder.token_texts(some) if encoder else []
            most = max(most, *(len(msgspec.json.encode(text)) + 1 for text in texts))
        return most

    def __call__(self, id: int) -> str:
        return self._texts[id] or self.name(id)

    @staticmethod
    def name(id: int) -> str:
        return f"token_id:{id}"

    def values(
        self, id: int, value: float, others: Sequence[int], of_others: Sequence[float]
    ) -> dict[str, float]:
        """Return the values of a token and of the most probable tokens, by text.

        If different tokens have equal texts, the first keeps the text; the others get `name`.
        """
        values = {self(id): value}
        for other, of_other in zip(others, of_others, strict=True):
            if other != id:
                text = self(other)
                values[self.name(other) if text in values else text] = of_other
        return values


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Full-vocabulary log-probabilities at every position of a request's items, float64 [rows].

    If the label is one of the `top` tokens, `label` equals that token's number; otherwise it is
    smaller than all of `top`. This is enforced: the two logits are summed in different orders, so
    rounding could put a nearly equal label above. Thus `label == best` exactly if greedy decoding
    would have chosen the label (the lowest id, if logits are equal).
    """

    label: Float64Array
    top: Float64Array  # [rows, num_top], of the most probable tokens, in descending order
    top_ids: Int32Array  # [rows, num_top]

    @property
    def best(self) -> Float64Array:
        return self.top[:, 0]

    @property
    def best_ids(self) -> Int32Array:
        return self.top_ids[:, 0]


def position_logprobs(result: ScoreResult, label_ids: Sequence[Int32Array]) -> PositionLogprobs:
    """Return log-probabilities per row; the request has one label per row, lse and top tokens."""
    top, top_ids = top_logprobs(result)
    assert result.lse is not None  # noqa: S101  (there are top tokens)
    logits = np.concatenate(result.label_logits).astype(np.float64)
    label = np.minimum(logits - result.lse.astype(np.float64), np.nextafter(top[:, -1], -np.inf))
    is_top = np.concatenate(label_ids)[:, None] == top_ids  # [rows, num_top]
    label = np.where(is_top.any(axis=1), np.where(is_top, top, -np.inf).max(axis=1), label)
    return PositionLogprobs(label, top, top_ids)


def top_logprobs(result: ScoreResult) -> tuple[Float64Array, Int32Array]:
    """Return log-probabilities and ids of each row's most probable tokens, [rows, num_top]."""
    lse = result.lse
    ids = result.top_ids
    logits = result.top_logits
    if lse is None or ids is None or logits is None:
        raise ValueError("the request did not ask for the log-sum-exp and the best tokens")
    return np.minimum(logits - lse.astype(np.float64)[:, None], 0.0), ids


def completion_json(
    sent: SentPrompts,
    answered: Mapping[int, PromptRows],
    options: CompletionOptions,
    cached_tokens: int,
    head: tuple[str, str, int, str],
) -> Iterator[bytes]:
    """Yield the answer as JSON, in pieces.

    Args:
        answered: the engine's results, by prompt; empty if the request needs none.
        options: the parts that the request asks for.
        cached_tokens: number of tokens that were cached, for the usage.
        head: the values that the answer begins with.
    """
    prompts = sent.ids
    every = options.every_position
    rows = [_positions(prompt, answered.get(n), every) for n, prompt in enumerate(prompts)]
    yield b""
    say = TokenTexts(sent.encoder)
    yield from say.add(*(part.top_ids for part in rows), *prompts)
    total = sum(map(len, prompts))
    new = len(prompts) if options.next_token else 0
    usage = TokenUsage(total, total + new, new, PromptTokensDetails(cached_tokens))
    answer = CompletionAnswer(*head, HOLE, usage)

    def choices() -> Iterator[bytes]:
        for index, prompt in enumerate(prompts):
            yield b"," if index else b"["
            text = sent.text(index, say) if options.echo else ""
            found = None
            if sent.candidates is not None:
                of_prompt = answered[index]
                logprobs = of_prompt.candidates(sent.candidates.num_rows(prompt))
                lists = (row.tolist() for row in logprobs)
                found = list_json(lists, max(1, NUMBERS // int(of_prompt.counts.max())))
            yield from _choice(index, text, _Entries(prompt, rows[index], options, say), found)
        yield b"]"

    yield from in_pieces(answer, choices())


def _choice(
    index: int, text: str, entries: "_Entries", candidates: Iterator[bytes] | None
) -> Iterator[bytes]:
    options = entries.options
    texts = [text, entries.say(int(entries.rows.best_ids[-1]))] if options.next_token else [text]
    shown = None if options.logprobs is None else Logprobs(HOLE, HOLE, HOLE, HOLE)
    lists: list[Iterator[bytes]] = []
    if options.logprobs is not None:
        top = list_json(entries.top(), max(1, NUMBERS // (1 + options.logprobs)))
        lists = [
            list_json(map(entries.say, entries.ids())),
            list_json(entries.logprobs()),
            top if options.logprobs else iter([b"null"]),
            list_json(entries.offsets()),
        ]
    choice = CompletionChoice(index, HOLE, shown)
    if candidates is not None:
        choice.prompt_token_id_logprobs = HOLE
        lists.append(candidates)
    return in_pieces(choice, text_json(*texts), *lists)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The returned tokens of one prompt, with log-probabilities; its first token has none.

    Args:
        prompt: its token ids.
        rows: the rows of all its positions, or only its last row.
        options: the parts that the request asks for.
        say: the tokens' texts.
    """

    prompt: Int32Array
    rows: PositionLogprobs
    options: CompletionOptions
    say: TokenTexts

    def ids(self) -> Iterator[int]:
        if self.options.every_position:
            yield from _numbers(self.prompt)
        if self.options.next_token:
            yield int(self.rows.best_ids[-1])

    def logprobs(self) -> Iterator[float | None]:
        if self.options.every_position:
            yield None
            yield from _numbers(self.rows.label[:-1])
        if self.options.next_token:
            yield float(self.rows.best[-1])

    def top(self) -> Iterator[dict[str, float] | None]:
        """Yield, for each token, its value and those of the most probable tokens in its place."""
        every = self.options.every_position
        rows = self.rows
        if every:
            yield None
        first = 0 if every else max(0, len(rows.top) - 1)
        last = len(rows.top) if self.options.next_token else len(rows.top) - 1
        tokens = islice(zip(self.ids(), self.logprobs(), strict=True), int(every), None)
        pairs = zip(_numbers(rows.top_ids[first:last]), _numbers(rows.top[first:last]), strict=True)
        for (id, value), (top_ids, top) in zip(tokens, pairs, strict=True):
            yield self.say.values(id, cast(float, value), top_ids, top)

    def offsets(self) -> Iterator[int]:
        """Yield the characters before each token."""
        before = 0
        for id in self.ids():
            yield before
            before += len(self.say(id))


def _numbers(values: NDArray[Any]) -> Iterator[Any]:
    """Yield an array's rows as Python's numbers or lists; few of them exist at a time."""
    step = max(1, NUMBERS // (values.shape[1] if values.ndim > 1 else 1))
    for start in range(0, len(values), step):
        yield from values[start : start + step].tolist()


def _positions(prompt: Int32Array, rows: PromptRows | None, every: bool) -> PositionLogprobs:
    """Return log-probabilities of a prompt's positions, or of its end, which has no label."""
    if rows is None or rows.result.top_ids is None:
        return PositionLogprobs(np.empty(0), np.empty((0, 1)), NO_TOKENS.reshape(0, 1))
    if every:
        return position_logprobs(rows.first_labels, [following(prompt)])
    top, top_ids = top_logprobs(rows.result)
    return PositionLogprobs(np.empty(0), top[-1:], top_ids[-1:])
