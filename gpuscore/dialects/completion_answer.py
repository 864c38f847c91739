"""The answer of /v1/completions, made one prompt and a few positions at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

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
    PreparedBody,
    in_pieces,
    list_json,
    text_bytes,
    text_json,
)
from gpuscore.dialects.wire import PromptTokensDetails, TokenUsage
from gpuscore.text.readouts import Candidates, PromptRows, by_prompt, following
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import NO_TOKENS, Float64Array, Int32Array
from gpuscore.types.request import ScoreResult

_CHOICE_BYTES = 192  # the names of a choice's fields and its index


@dataclass(frozen=True, slots=True)
class AskedPrompts:
    """The prompts of a body, and what is asked about each.

    Args:
        ids: the token ids of each prompt.
        texts: the prompts as they were sent; None if they were token ids.
        encoder: the model's tokenizer, if it has one.
        vocab_rows: number of the model's token ids.
        echo: the prompt itself.
        next_token: the most probable token after it.
        logprobs: 0: of the returned tokens; n: also of the n most probable tokens.
        candidates: the tokens whose log-probabilities are asked for.
    """

    ids: Sequence[Int32Array]
    texts: Sequence[str] | None
    encoder: TextEncoder | None
    vocab_rows: int
    echo: bool
    next_token: bool
    logprobs: int | None
    candidates: Candidates | None

    @property
    def every_position(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def num_top(self) -> int:
        """Number of most probable tokens to ask for: of every position 1 even if none is shown.

        The most probable token is the answer's next token, and shows whether the prompt's own token
        is the best.
        """
        if not (self.every_position or self.next_token):
            return 0
        return min(max(1, self.logprobs or 0), self.vocab_rows)

    def text(self, index: int, say: "TokenTexts") -> str:
        """Return the text of a prompt. Without a tokenizer, `say` gives it token by token."""
        if self.texts is not None:
            return self.texts[index]
        ids = self.ids[index].tolist()
        return "".join(map(say, ids)) if self.encoder is None else self.encoder.text(ids)


def completion_bytes(prepared: PreparedBody[Any]) -> int:
    """Return the most bytes of the choices."""
    asked: AskedPrompts = prepared.notes
    token = TokenTexts.longest(asked.encoder, asked.vocab_rows)
    prompts = len(asked.ids)
    tokens = prepared.prompt_tokens
    count = (tokens if asked.every_position else 0) + (prompts if asked.next_token else 0)
    size = prompts * (_CHOICE_BYTES + token)
    if asked.candidates is not None:
        size += NUMBER_BYTES * asked.candidates.count(asked.ids) + 3 * tokens
    if asked.logprobs is not None:
        entry = token + NUMBER_BYTES
        top = asked.logprobs and 3 + entry * (asked.logprobs + 1)
        size += count * (entry + COUNT_BYTES + top)
    if not asked.echo:
        return size
    if asked.texts is not None:
        return size + text_bytes(*asked.texts)
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


NO_POSITIONS = PositionLogprobs(np.empty(0), np.empty((0, 1)), NO_TOKENS.reshape(0, 1))


def position_logprobs(result: ScoreResult, label_ids: Sequence[Int32Array]) -> PositionLogprobs:
    """Return log-probabilities per row; the request has one label per row, lse and top tokens."""
    ids = result.top_ids
    if result.lse is None or ids is None or result.top_logits is None:
        raise ValueError("the request did not ask for the log-sum-exp and the best tokens")
    lse = result.lse.astype(np.float64)
    top = np.minimum(result.top_logits - lse[:, None], 0.0)
    logits = np.concatenate(result.label_logits).astype(np.float64)
    label = np.minimum(logits - lse, np.nextafter(top[:, -1], -np.inf))
    is_top = np.concatenate(label_ids)[:, None] == ids  # [rows, num_top]
    label = np.where(is_top.any(axis=1), np.where(is_top, top, -np.inf).max(axis=1), label)
    return PositionLogprobs(label, top, ids)


def encode_completion(prepared: PreparedBody[Any]) -> Iterator[bytes]:
    """Return the answer as JSON, made a few positions at a time."""
    asked: AskedPrompts = prepared.notes
    prompts = asked.ids
    requests = prepared.parts
    results = prepared.results
    places = prepared.places
    if prepared.result is not None:  # of the undivided request
        requests = (prepared.engine_request,)
        results = (prepared.result,)
        places = [range(len(prompts))]
    answered: dict[int, PromptRows] = {}
    for group, request, result in zip(places, requests, results, strict=True):
        answered.update(zip(group, by_prompt(request, result), strict=True))
    rows = [NO_POSITIONS] * len(prompts)
    for index, prompt in enumerate(prompts if asked.num_top else ()):
        first = answered[index].first_labels
        rows[index] = position_logprobs(first, [following(prompt)[-len(first.label_logits[0]) :]])
    yield b""
    say = TokenTexts(asked.encoder)
    yield from say.add(*(part.top_ids for part in rows), *prompts)
    total = prepared.prompt_tokens
    new = len(prompts) if asked.next_token else 0
    usage = TokenUsage(total, total + new, new, PromptTokensDetails(prepared.cached_tokens))

    def choices() -> Iterator[bytes]:
        for index, prompt in enumerate(prompts):
            yield b"," if index else b"["
            found = None
            if asked.candidates is not None:
                of_prompt = answered[index]
                logprobs = of_prompt.candidates(asked.candidates.num_rows(prompt))
                lists = (row.tolist() for row in logprobs)
                found = list_json(lists, max(1, NUMBERS // int(of_prompt.counts.max())))
            yield from _choice(asked, index, rows[index], say, found)
        yield b"]"

    yield from in_pieces(
        CompletionAnswer(*prepared.head("text_completion"), HOLE, usage), choices()
    )


def _choice(
    asked: AskedPrompts,
    index: int,
    rows: PositionLogprobs,
    say: TokenTexts,
    candidates: Iterator[bytes] | None,
) -> Iterator[bytes]:
    """Return the JSON of a prompt's choice; `rows` are those of its last positions, or of all."""
    every = asked.every_position
    ids = asked.ids[index] if every else NO_TOKENS  # the returned tokens
    values = rows.label[:-1] if every else NO_POSITIONS.label  # a prompt's first token has none
    texts = [asked.text(index, say) if asked.echo else ""]
    last = len(rows.top) - 1
    if asked.next_token:
        ids = np.append(ids, rows.top_ids[last, 0])
        values = np.append(values, rows.top[last, 0])
        texts.append(say(int(ids[-1])))
    shown = None
    lists: list[Iterator[bytes]] = []
    if asked.logprobs is not None:
        shown = Logprobs(HOLE, HOLE, HOLE, HOLE)
        first = [None] if every else []
        some = slice(0 if every else last, last + asked.next_token)
        columns: list[NDArray[Any]]
        columns = [ids[len(first) :], values, rows.top_ids[some], rows.top[some]]
        tops = (say.values(*entry) for entry in zip(*map(_numbers, columns), strict=True))
        top = list_json(chain(first, tops), max(1, NUMBERS // (1 + asked.logprobs)))
        lists = [
            list_json(map(say, _numbers(ids))),
            list_json(chain(first, _numbers(values))),
            top if asked.logprobs else iter([b"null"]),
            list_json(accumulate((len(say(id)) for id in _numbers(ids[:-1])), initial=0)),
        ]
    choice = CompletionChoice(index, HOLE, shown)
    if candidates is not None:
        choice.prompt_token_id_logprobs = HOLE
        lists.append(candidates)
    return in_pieces(choice, text_json(*texts), *lists)


def _numbers(values: NDArray[Any]) -> Iterator[Any]:
    """Yield an array's rows as Python's numbers or lists; few of them exist at a time."""
    step = max(1, NUMBERS // (values.shape[1] if values.ndim > 1 else 1))
    for start in range(0, len(values), step):
        yield from values[start : start + step].tolist()
